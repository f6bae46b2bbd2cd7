"""`zeroshard doctor --optimizers`: compares sharded optimizers with the same optimizers in one process."""
