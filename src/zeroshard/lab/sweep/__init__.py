"""Many runs from one file: which, one after another, and what came out."""
