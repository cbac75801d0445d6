"""What a round of cases came to: its three files, made and read."""
