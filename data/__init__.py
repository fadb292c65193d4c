"""From chats to token rows, captured features and batches (floor 2)."""

if __name__ != "draftsmith.data":
    raise ImportError("This is a part of draftsmith: write `import draftsmith.data`, not `import data`.")
