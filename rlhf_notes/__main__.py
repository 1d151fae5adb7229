"""`python -m rlhf_notes` is the command `rlhf-notes`."""
import sys

from .cli import main

sys.exit(main())
