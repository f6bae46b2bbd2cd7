"""What an engine replaces on the user's model, so that ordinary code works or says what to do."""
