"""Local steps: replicas synchronise every H steps instead of every step, as DiLoCo and its streaming form do."""
