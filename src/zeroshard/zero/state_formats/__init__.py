"""States of torch's optimizers in fewer bits between steps: ``Zero.optimizer(cls, state_format="int8")``."""
