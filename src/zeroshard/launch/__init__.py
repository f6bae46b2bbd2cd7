"""How ranks are started, find each other, and end."""
