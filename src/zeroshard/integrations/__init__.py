"""The engine in other people's training loops: Accelerate, `transformers.Trainer`, Lightning.

Each module needs the package that it is named after, and is imported by whoever uses it; nothing in zeroshard does.

- `zeroshard.integrations.accelerate`: an `Accelerator` whose ``prepare`` shards.
- `zeroshard.integrations.lightning`: a strategy for Lightning's `Trainer`.
- `zeroshard.integrations.transformers`: a `Trainer` that shards, saves and resumes through the engine.
"""
