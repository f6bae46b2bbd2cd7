"""Starting ranks, their rendezvous, and how they end."""
