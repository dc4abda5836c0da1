"""The definition of a run: options, presets, and the settings that follow from them."""
