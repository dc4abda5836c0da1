"""What a run is to be: options, presets, and the settings that follow from them."""
