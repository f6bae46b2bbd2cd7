"""The lab: says before a run what each stage holds and sends, from the same table and layout as the engine."""
