"""Draft heads in the formats of EAGLE and other engines: import and export. Runs no heads."""
