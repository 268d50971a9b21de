"""Constants of the random draws, shared by the kernel and by PyTorch so that a key gives the same draw on every device.

A draw is an exponential race: argmax w / E with E ~ Exp(1) chooses token i with probability w_i / sum(w), without normalising.
The race has two rounds: first among blocks of BLOCK tokens, by the sums of their weights, then within the winning block. A row
therefore needs vocab / BLOCK + BLOCK random numbers instead of one for each token. The numbers are splitmix64 hashes of the
row's key (Steele, Lea, Flood 2014).
"""

BLOCK = 256
GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB
