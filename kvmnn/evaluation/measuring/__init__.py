"""What is measured of one cell: loss and accuracy, time, memory, lossless sizes, traces."""
