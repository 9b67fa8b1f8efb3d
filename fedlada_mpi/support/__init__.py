"""What all rooms stand on: errors, files of others, full disks, processes, signals, random numbers, users' code."""
