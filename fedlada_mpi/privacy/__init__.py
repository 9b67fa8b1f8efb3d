"""What silos keep from the server and from each other: masks and the keys that they are made of."""
