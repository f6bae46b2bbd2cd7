"""The training loop, and the guards, measurements, checkpoint saves and watchdog around its steps."""
