"""Data of a fine-tuning: conversations and pairs of prompt and completion, where only what the model answers counts.

rows       rows of .jsonl and .parquet, as dicts
template   a chat template: found, compiled in Jinja2's sandbox, rendered
texts      a row as text, and which of its characters are the model's to write
encode     the same as token ids, and which of them count in the loss
store      examples in a prepared folder: ids, what counts, where each ends
prepare    all of these, one after the other
packing    which examples share a row
plain      documents of plain text as examples, to be packed
row_plan   which examples make which row of a run's length, one each or packed
batches    rows as batches, a pure function of (step, micro_step)
"""
