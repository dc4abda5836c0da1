"""Networks, and the augmentation of their training images."""
