"""What runs in the peers' own environment: `python -m workers.NAME` in the folder above.

Nothing here imports polybasic, which is not installed there.
"""
