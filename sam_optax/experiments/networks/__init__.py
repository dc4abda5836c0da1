"""Networks, and the augmentation of what they are trained on."""
