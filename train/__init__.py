"""The training loop, checkpoints, tracking and the command line (floor 4)."""

if __name__ != "draftsmith.train":
    raise ImportError("This is a part of draftsmith: write `import draftsmith.train`, not `import train`.")
