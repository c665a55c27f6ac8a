"""`python -m mocker`."""

import sys

from mocker.cli import main

if __name__ == "__main__":
    sys.exit(main())
