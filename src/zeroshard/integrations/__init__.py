"""Uses the engine in the training loops of Accelerate and `transformers.Trainer`.

Each module needs the package that it is named after. Users import it themselves; nothing in zeroshard imports it.

- `zeroshard.integrations.accelerate`: an `Accelerator` whose ``prepare`` shards.
- `zeroshard.integrations.transformers`: a `Trainer` that shards, saves and resumes through the engine.
"""
