"""Other programs: the engine in their training loops; their settings and weights imported, ours exported to them.

The modules of training loops need the package that they are named after. Users import them; nothing in zeroshard does.

- `zeroshard.integrations.accelerate`: an `Accelerator` whose ``prepare`` shards.
- `zeroshard.integrations.transformers`: a `Trainer` that shards, saves and resumes through the engine.
"""
