"""What silos keep from the server and from each other, and clients from all: masks, keys, and noise."""
