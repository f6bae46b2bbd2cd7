"""`zeroshard sweep`: many training runs from one file, run one after another, and their results."""
