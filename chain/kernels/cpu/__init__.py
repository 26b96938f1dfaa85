"""CPU kernels in C++: compiled once on the machine that runs them, called through ctypes."""
