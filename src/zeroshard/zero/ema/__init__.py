"""An exponential moving average of the weights, sharded like them: `Zero.ema`."""
