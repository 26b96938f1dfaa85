"""Systems side by side, whether their outputs are identical, and the report. Chooses no plan."""
