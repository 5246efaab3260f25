"""The datasets: where they are, how they are fetched and read."""
