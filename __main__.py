"""`python -m polybasic`, as launchers of several processes call it."""

import sys

from polybasic.recipes.cli.main import main

if __name__ == "__main__":
    # DeepSpeed's launcher says as an argument what it says by LOCAL_RANK, too
    main([word for word in sys.argv[1:] if not word.startswith("--local_rank=")])
