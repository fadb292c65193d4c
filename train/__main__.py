"""`accelerate launch -m draftsmith.train RECIPE [section.key=value]`: the train verb alone, on any number of ranks."""

import sys

from draftsmith.train.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
