"""Settings of a run: pydantic models that parse, check and write them back as TOML."""
