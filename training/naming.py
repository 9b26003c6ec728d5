"""English for concept names: articles, plurals, and a common word where the Unicode name is strange."""

import re

RENAMED = {
    "adhesive bandage": "bandage", "airplane": "plane", "american football": "American football",
    "articulated lorry": "truck", "automobile": "car", "badminton": "badminton racket",
    "baguette bread": "baguette", "bellhop bell": "desk bell", "beverage box": "juice box",
    "billed cap": "baseball cap", "bottle with popping cork": "champagne bottle", "bowling": "bowling pins",
    "carpentry saw": "saw", "chequered flag": "checkered flag", "closed book": "red book",
    "cocktail glass": "cocktail", "collision": "explosion", "construction": "road barrier",
    "cooking": "frying pan", "couch and lamp": "couch", "cricket": "grasshopper",
    "cricket game": "cricket bat", "cut of meat": "steak", "deciduous tree": "tree",
    "desert island": "island", "dollar banknote": "dollar bill", "doughnut": "donut",
    "droplet": "water drop", "ear of corn": "corn cob", "evergreen tree": "pine tree",
    "field hockey": "field hockey stick", "fire engine": "fire truck", "fish cake with swirl": "fish cake",
    "flag in hole": "golf flag", "flying disc": "frisbee", "fork and knife with plate": "plate",
    "game die": "die", "gem stone": "diamond", "globe showing Americas": "globe", "goal net": "goal",
    "headphone": "headphones", "high voltage": "lightning bolt", "hippopotamus": "hippo", "honeybee": "bee",
    "hot beverage": "cup of coffee", "hourglass done": "hourglass", "ice": "ice cube",
    "ice cream": "ice cream sundae", "ice hockey": "ice hockey stick", "lacrosse": "lacrosse stick",
    "lady beetle": "ladybug", "leafy green": "lettuce", "locked": "padlock",
    "magnifying glass tilted right": "magnifying glass", "mantelpiece clock": "mantel clock",
    "manual wheelchair": "wheelchair", "man’s shoe": "dress shoe", "mate": "mate drink",
    "meat on bone": "meat on a bone", "mechanical arm": "robot arm", "mirror ball": "disco ball",
    "musical keyboard": "piano keyboard", "one-piece swimsuit": "swimsuit", "optical disk": "cd",
    "ping pong": "ping pong paddle", "poultry leg": "chicken leg", "racing car": "race car",
    "rescue worker’s helmet": "rescue helmet", "rhinoceros": "rhino", "ring buoy": "life buoy",
    "rugby football": "rugby ball", "sake": "sake set", "satellite antenna": "satellite dish",
    "sauropod": "brontosaurus", "shallow pan of food": "pan of food",
    "snow-capped mountain": "snowy mountain", "soft ice cream": "ice cream cone",
    "speaker high volume": "speaker", "speech balloon": "speech bubble", "sport utility vehicle": "jeep",
    "sports medal": "medal", "teacup without handle": "teacup", "tennis": "tennis ball",
    "triangular flag": "red flag", "tumbler glass": "whiskey glass", "umbrella on ground": "beach umbrella",
    "unlocked": "open padlock", "vertical traffic light": "traffic light", "video game": "game controller",
    "water wave": "wave", "wedding": "wedding chapel", "woman’s boot": "boot", "woman’s hat": "sun hat",
    "woman’s sandal": "sandal", "wrapped gift": "gift",
}  # fmt: skip

# Chosen by hand among the CLDR keywords and the common words; no word names two concepts.
SYNONYMS = {
    "American football": ["gridiron ball"], "accordion": ["squeezebox"], "axe": ["hatchet"],
    "backpack": ["rucksack"], "badminton racket": ["shuttlecock racket"], "baseball cap": ["cap"],
    "bathtub": ["bath"], "bear": ["grizzly"], "bee": ["honeybee"], "bell pepper": ["capsicum"],
    "bicycle": ["bike"], "blowfish": ["pufferfish"], "bow and arrow": ["archery bow"],
    "bread": ["loaf of bread"], "brontosaurus": ["dinosaur"], "bucket": ["pail"],
    "cactus": ["desert cactus"], "car": ["automobile"], "cat": ["kitty", "kitten"], "chicken": ["hen"],
    "chicken leg": ["drumstick"], "cockroach": ["roach"], "corn cob": ["maize"], "couch": ["sofa"],
    "crocodile": ["alligator"], "crown": ["tiara"], "cup of coffee": ["coffee", "hot drink"],
    "curry rice": ["curry"], "dagger": ["short sword"], "diamond": ["gem", "jewel"], "die": ["game die"],
    "disco ball": ["mirror ball"], "dog": ["puppy", "hound"], "donkey": ["mule"], "donut": ["doughnut"],
    "dress shoe": ["leather shoe"], "duck": ["mallard"], "eggplant": ["aubergine"], "envelope": ["letter"],
    "explosion": ["blast"], "fire": ["flame"], "fire truck": ["fire engine"], "flashlight": ["torch"],
    "floppy disk": ["diskette"], "flying saucer": ["ufo", "alien spaceship"], "french fries": ["fries"],
    "frisbee": ["flying disc"], "frog": ["toad"], "game controller": ["gamepad"], "gear": ["cogwheel"],
    "ghost": ["phantom"], "gift": ["present"], "glasses": ["eyeglasses", "spectacles"], "globe": ["earth"],
    "grasshopper": ["cricket"], "hamburger": ["burger"], "hammer": ["mallet"], "handbag": ["ladies' bag"],
    "helicopter": ["chopper"], "high-heeled shoe": ["stiletto"], "hippo": ["hippopotamus"],
    "horse": ["pony"], "hot dog": ["hotdog"], "hut": ["cabin"], "ice cream cone": ["soft ice cream"],
    "jack-o-lantern": ["halloween pumpkin"], "jeans": ["trousers"], "jeep": ["suv"],
    "juice box": ["beverage box"], "kitchen knife": ["chef's knife"], "ladybug": ["ladybird"],
    "laptop": ["notebook computer"], "light bulb": ["lightbulb"], "lightning bolt": ["thunderbolt"],
    "lipstick": ["lip color"], "locomotive": ["steam engine"], "luggage": ["suitcase"],
    "magnifying glass": ["magnifier"], "medal": ["sports medal"],
    "mobile phone": ["smartphone", "cell phone"], "money bag": ["sack of money"],
    "motorcycle": ["motorbike"], "mouse trap": ["mousetrap"], "mushroom": ["toadstool"], "necktie": ["tie"],
    "newspaper": ["gazette"], "octopus": ["kraken"], "orangutan": ["orange ape"], "package": ["parcel"],
    "padlock": ["lock"], "palm tree": ["coconut palm"], "paw prints": ["animal tracks"],
    "piano keyboard": ["piano"], "pick": ["pickaxe"], "pig": ["hog"], "pinata": ["party donkey"],
    "pine tree": ["evergreen tree"], "plane": ["airplane", "jet"], "plate": ["dinner plate"],
    "police car": ["patrol car"], "pool 8 ball": ["billiard ball"], "postbox": ["mailbox"],
    "rabbit": ["bunny"], "race car": ["racing car"], "red apple": ["apple"], "rhino": ["rhinoceros"],
    "ringed planet": ["saturn"], "road barrier": ["construction sign"], "robot": ["android"],
    "rock": ["boulder"], "rocket": ["spaceship"], "rooster": ["cockerel"], "running shoe": ["sneaker"],
    "sailboat": ["yacht"], "satellite dish": ["satellite antenna"], "saxophone": ["sax"],
    "seedling": ["sprout"], "ship": ["ocean liner"], "shopping cart": ["trolley"], "shrimp": ["prawn"],
    "skunk": ["polecat"], "sled": ["sleigh"], "snake": ["serpent"], "soccer ball": ["football"],
    "socks": ["stockings"], "spaghetti": ["pasta"], "spiral shell": ["seashell"], "sponge": ["dish sponge"],
    "steak": ["cut of meat"], "stopwatch": ["chronometer"], "sun hat": ["ladies' hat"], "t-shirt": ["tee"],
    "taxi": ["cab"], "teddy bear": ["toy bear"], "television": ["tv"], "tent": ["camping tent"],
    "toilet": ["lavatory"], "truck": ["lorry"], "turtle": ["tortoise"], "umbrella": ["parasol"],
    "violin": ["fiddle"], "wastebasket": ["trash can"], "water drop": ["droplet"], "wheel": ["tire"],
    "wheelchair": ["manual wheelchair"], "whiskey glass": ["tumbler"], "wood": ["timber"],
    "worm": ["earthworm"],
}  # fmt: skip

# Mass nouns and pairs: no article, no count.
UNCOUNTED = {
    "bacon", "bread", "broccoli", "bubble tea", "butter", "coffee", "cooked rice", "coral", "curry",
    "curry rice", "dango", "fire", "fondue", "garlic", "ginger root", "green salad", "lettuce", "luggage",
    "maize", "meat on a bone", "pasta", "popcorn", "Santa Claus", "shaved ice", "soap", "soft ice cream",
    "spaghetti", "sparkles", "sushi", "thread", "timber", "wood", "yarn",
}  # fmt: skip
PLURALS = {
    "animal tracks", "ballet shoes", "beans", "blueberries", "books", "bowling pins", "chains", "cherries",
    "chopsticks", "crossed swords", "eyeglasses", "footprints", "french fries", "fries", "glasses",
    "gloves", "goggles", "grapes", "headphones", "jeans", "maracas", "nesting dolls", "pancakes",
    "paw prints", "peanuts", "prayer beads", "scissors", "shopping bags", "shorts", "skis", "socks",
    "spectacles", "stockings", "sunglasses", "trousers",
}  # fmt: skip
IRREGULAR = {
    "bison": "bison", "blowfish": "blowfish", "bow and arrow": "bows and arrows", "bus": "buses",
    "cactus": "cacti", "computer mouse": "computer mice", "deer": "deer", "die": "dice", "ewe": "ewes",
    "fallen leaf": "fallen leaves", "fish": "fish", "flying saucer": "flying saucers",
    "fried shrimp": "fried shrimp", "goose": "geese", "hippo": "hippos", "jellyfish": "jellyfish",
    "kitchen knife": "kitchen knives", "knife": "knives", "leaf": "leaves", "loaf": "loaves",
    "mango": "mangoes", "maple leaf": "maple leaves", "minibus": "minibuses", "moose": "moose",
    "mosquito": "mosquitoes", "mouse": "mice", "ox": "oxen", "potato": "potatoes",
    "pufferfish": "pufferfish", "scarf": "scarves", "sheaf": "sheaves", "shrimp": "shrimp",
    "snowman": "snowmen", "squid": "squid", "tomato": "tomatoes", "tooth": "teeth",
    "trolleybus": "trolleybuses", "tropical fish": "tropical fish", "volcano": "volcanoes",
    "wolf": "wolves",
}  # fmt: skip


def is_plural(name: str) -> bool:
    """Whether the name already speaks of several things ("scissors")."""
    return name in PLURALS


def is_countable(name: str) -> bool:
    """Whether "three ..." can be said."""
    return name not in UNCOUNTED and not is_plural(name) and not re.search(r" (and|with|in) ", name)


def with_article(name: str) -> str:
    """The name as it stands in a sentence: "an axe", "scissors", "a unicorn"."""
    if name in UNCOUNTED or is_plural(name):
        return name
    starts_like_you = re.match(r"(uni|use|euro|ewe|ukulele|utensil|ufo|one-)", name.lower())
    starts_with_vowel = name[0].lower() in "aeiou" or re.match(r"(x-ray|hour)", name.lower())
    return f"{'an' if starts_with_vowel and not starts_like_you else 'a'} {name}"


def pluralize(name: str) -> str:
    """The plural: "boxes", "pots of food", "wolves"; names that cannot be counted come back unchanged."""
    if not is_countable(name):
        return name
    if name in IRREGULAR:
        return IRREGULAR[name]
    head, joint, rest = re.match(r"(.*?)( of | on | at |$)(.*)", name).groups()
    last = head.split(" ")[-1]
    if last in IRREGULAR:
        head = head[: len(head) - len(last)] + IRREGULAR[last]
    elif re.search(r"(s|x|z|ch|sh)$", head):
        head += "es"
    elif re.search(r"[^aeiou]y$", head):
        head = head[:-1] + "ies"
    else:
        head += "s"
    return head + joint + rest
