"""The sentences of the captions. {} stands for names, colours, pictures; a repeated line is likelier."""

PICTURE_WORDS = ("picture {}", "image {}", "<Picture {}>")
ON_SOLID = (
    " on {} {} background",
    " on {} {} background",
    " in front of {} {} background",
    " against {} {} background",
)
ON_GRADIENT = (" on a gradient background from {0} to {1}", " on {2} {0} to {1} gradient")
ON_LANDSCAPE = {
    "sky": (" in the sky", " on a cloudy sky background"),
    "grass": (" on the grass", " in a green meadow"),
    "sea": (" by the sea", " on a sea background"),
    "night": (" at night", " on a starry night sky background"),
}
TO_GRAY = (
    "make it black and white",
    "make the picture black and white",
    "turn the image black and white",
    "convert picture 1 to black and white",
    "remove the colors",
    "black and white",
)
TO_MIRROR = (
    "mirror the picture",
    "mirror the image",
    "flip it horizontally",
    "flip the picture from left to right",
    "mirror it",
    "mirror picture 1",
)
TO_REMOVE = ("remove", "remove", "remove", "delete", "erase", "take away")
TO_REPLACE = (
    "replace {} with {}",
    "replace {} with {}",
    "replace {} by {}",
    "turn {} into {}",
    "change {} to {}",
)
TO_STYLE = (
    "change it to {} style",
    "make it {} style",
    "redraw it in {} style",
    "convert the picture to {} style",
    "in {} style",
)
TO_NAMED_STYLE = ("change {} to {} style", "make {} {} style", "redraw {} in {} style", "show {} in {} style")
TO_BACKGROUND = {
    "solid": (
        "change the background to {0}",
        "make the background {0}",
        "put it on {2} {0} background",
        "replace the background with {0}",
        "{0} background",
    ),
    "gradient": (
        "change the background to a gradient from {0} to {1}",
        "put it on {2} {0} to {1} gradient",
        "make the background a gradient from {0} to {1}",
    ),
    "stripes": (
        "change the background to {0} and {1} stripes",
        "put it on {2} {0} and {1} striped background",
        "make the background {0} and {1} striped",
    ),
    "sky": ("put it in the sky", "change the background to a cloudy sky"),
    "grass": ("put it on the grass", "change the background to a green meadow"),
    "sea": ("put it by the sea", "change the background to the sea"),
    "night": ("change the background to a starry night sky", "make it night"),
}
TO_OBJECT_ON_BACKGROUND = (
    "put {} of {} on the background of {}",
    "put {} from {} on the background of {}",
    "{} of {} on the background of {}",
    "place {} of {} in front of the background of {}",
)
TO_STYLE_OF = ("{} in the style of {}", "show {} in the style of {}", "redraw {} in the style of {}")
