"""Fine-tuning data: conversations, and pairs of prompt and completion; only the model's answers count in the loss.

template   a chat template: found, compiled in Jinja2's sandbox, rendered
texts      a row as text, and which of its characters the model is to write
encode     the text as token ids, and which of them count in the loss
store      examples in a prepared folder: ids, which of them count, where each example ends
prepare    all of these steps, one after the other
packing    which examples share a row
row_plan   which examples make up which row of ``seq_len`` tokens: one each, or packed
batches    rows as batches, a pure function of (step, micro_step)
"""
