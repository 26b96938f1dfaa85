"""Draft heads as EAGLE and other engines store them: imported, exported. Trains and runs none."""
