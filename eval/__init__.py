"""The speculative runtime, verification, acceptance, certificate and release (floor 3)."""

if __name__ != "draftsmith.eval":
    raise ImportError("This is a part of draftsmith: write `import draftsmith.eval`, not `import eval`.")
