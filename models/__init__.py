"""Target models, draft families, losses, masks, caches and the export format (floor 1)."""

if __name__ != "draftsmith.models":
    raise ImportError("This is a part of draftsmith: write `import draftsmith.models`, not `import models`.")
