"""Recipes: YAML files and how they are read (floor 0)."""

if __name__ != "draftsmith.recipes":
    raise ImportError("This is a part of draftsmith: write `import draftsmith.recipes`, not `import recipes`.")
