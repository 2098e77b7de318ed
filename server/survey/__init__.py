"""What sites tell of their tables: the server's half of a survey, and the description that is announced."""
