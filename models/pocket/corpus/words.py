"""Word lists. One idea per list; stories and facts pick from them."""

CHILD_NAMES = {
    "m": "Tom Ben Sam Max Leo Jack Oliver Noah Finn Henry Peter Daniel Oscar Lucas Hugo Adam "
    "Theo Felix Omar Ravi Ivan Marco Kofi Ken "
    "Samir Jonas Emil Toby Simon David Arthur Milo Eli Carlos Yusuf".split(),
    "f": "Anna Mia Lily Emma Sara Nina Clara Ella Rosa Lucy Maya Zoe Ruby Alice Grace Ida Eva "
    "Julia Hana Leila Amara Priya Nora Olive "
    "Tess Molly Stella Vera Iris Freya Lena Sofia Kate Mei Fatima".split(),
}
BEAST_NAMES = {
    "m": "Pip Rusty Bruno Tumble Oakley Barney Nibble Fergus Boris Hopper Digby Ruff Bramble "
    "Cosmo Otto Moss Flint Rufus Monty Hazelnut "
    "Pepper Basil Thistle Copper Jasper".split(),
    "f": "Daisy Poppy Willow Bella Dot Hazel Luna Misty Clover Fern Pearl Tansy Snowy Ginger "
    "Juniper Honey Ivy Maple Nutmeg Olga Penny "
    "Rosie Sage Topsy Velvet".split(),
}
BEASTS = ("rabbit fox mouse bear hedgehog squirrel badger otter beaver owl duck frog turtle cat "
          "dog goat lamb pony mole sparrow "
          "raccoon deer penguin crow kitten puppy").split()
STRAY_BEASTS = ("bird kitten puppy duckling lamb butterfly hedgehog rabbit turtle squirrel calf "
                "foal owl").split()
ELDERS = [("Grandma Rose", "f", "grandmother"), ("Grandpa Joe", "m", "grandfather"),
          ("Mrs. Bell", "f", "teacher"), ("Mr. Finch", "m", "teacher"), ("Mr. Brown", "m", "baker"),
          ("Mrs. Green", "f", "gardener"), ("Old Walter", "m", "fisherman"),
          ("Aunt May", "f", "painter"),
          ("Uncle Bob", "m", "carpenter"), ("Mrs. Hill", "f", "farmer"),
          ("Mr. Stone", "m", "builder"), ("Doctor Wells", "f", "doctor"),
          ("Mrs. Page", "f", "librarian"), ("Captain Reed", "m", "sailor"),
          ("Mr. Clay", "m", "potter"), ("Old Martha", "f", "weaver"),
          ("Mr. Field", "m", "shepherd"), ("Aunt Nell", "f", "cook"),
          ("Mr. Bright", "m", "clockmaker"), ("Mrs. Lark", "f", "singer"), ]
TRAITS = ("brave curious kind shy clever patient cheerful honest careful hopeful friendly quiet "
          "generous stubborn gentle").split()
TOWNS = [
    "a small village", "a quiet town", "a busy town by the sea", "a little village near the hills",
    "a town beside a wide river", "a village at the edge of the forest", "a small harbor town",
    "a green valley", "a village between two mountains", "a sunny town with narrow streets"
]
CHILD_HOMES = [
    "a small white house", "a tall brick house", "a cottage with a red door",
    "a house near the school", "a little farm", "a room above the bakery",
    "a wooden house by the lake", "a house with a big garden", "an apartment on the top floor",
    "a house at the end of the road"
]
BEAST_HOMES = [
    "a cozy burrow under an oak tree", "a hollow log near the stream",
    "a warm nest of leaves and moss", "a small den in the forest",
    "a snug hole beneath the roots of a tree", "a little house made of sticks",
    "a dry cave at the foot of the hill", "a quiet corner of the old barn",
    "a house of reeds beside the pond"
]
LANDS = [
    "the forest", "the meadow", "the hill", "the river", "the lake", "the beach", "the old bridge",
    "the park", "the field", "the orchard"
]
WEATHER = {
    "spring": [
        "It was a bright spring morning.", "A soft spring rain had just stopped.",
        "The first flowers of spring were opening.", "Birds were building nests in the trees.",
        "The spring air smelled of wet grass."
    ], "summer": [
        "It was a hot summer day.", "The summer sun was high in the sky.",
        "It was a warm summer evening.", "A light summer wind moved the tall grass.",
        "There was not a cloud in the sky."
    ], "autumn": [
        "It was a cool autumn day.", "Red and yellow leaves covered the ground.",
        "The autumn wind was blowing.", "The air smelled of apples and smoke.",
        "A grey mist lay over the fields."
    ], "winter": [
        "It was a cold winter morning.", "Snow had fallen all night.",
        "The windows were white with frost.", "The winter wind whistled around the roof.",
        "The pond was covered with ice."
    ],
}
FOODS = [
    "bread", "soup", "apple pie", "honey cake", "cheese", "porridge", "berries", "carrots",
    "cookies", "pancakes", "rice", "noodles", "plums", "nuts", "strawberries", "pears", "stew",
    "muffins", "salad", "corn"
]
COLORS = "red blue green yellow orange purple white black brown pink silver golden grey".split()
STUFFS = "wooden paper glass woolen tin stone brass".split()
TOYS = ("ball kite boat key hat scarf drum bell lamp book box ring whistle map basket cup coin "
        "button umbrella lantern doll wagon "
        "mitten flute compass feather necklace spoon mirror toy").split()
TREES = [
    "oak tree", "apple tree", "willow tree", "pine tree", "cherry tree", "maple tree", "birch tree",
    "pear tree"
]
FLOWERS = ["roses", "tulips", "daisies", "sunflowers", "violets", "lilies", "poppies", "bluebells"]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = ("January February March April May June July August September October November "
          "December").split()
NUMBERS = ("zero one two three four five six seven eight nine ten eleven twelve thirteen "
           "fourteen fifteen sixteen seventeen eighteen "
           "nineteen twenty").split()
INDOOR_SPOTS = [
    "under the bed", "behind the door", "in the kitchen", "on the shelf", "under the table",
    "inside the cupboard", "behind the curtain", "in the big drawer", "next to the stove",
    "on the stairs", "under the rug", "in the basket by the window"
]
OUTDOOR_SPOTS = [
    "behind the barn", "near the pond", "under the bench", "beside the well", "in the tall grass",
    "by the garden gate", "under the bushes", "beside the path", "near the bridge",
    "between two rocks", "at the edge of the forest", "among the flowers", "in the sand",
    "under the hedge"
]
FEARS = [
    ("the dark", "dark", "turned off the lamp", "the dark was only the room with the light gone"),
    ("thunder", "storm", "heard the thunder roll", "thunder was only a loud sound far away"),
    ("deep water", "water", "put one foot into the water", "the water would carry anyone who "
     "stayed calm"),
    ("high places", "height", "looked up at the tall ladder", "one step after another was enough"),
    ("big dogs", "dog", "saw the big dog at the gate", "the dog only wanted to play"),
    ("speaking in front of others", "crowd", "stood up in front of the class",
     "everyone there was a friend"),
    ("the old bridge", "bridge", "stepped onto the first board of the bridge",
     "the bridge was strong and steady"),
    ("spiders", "spider", "saw the spider in the corner", "the spider was small and busy with "
     "its web"),
    ("the deep forest", "forest", "walked between the first tall trees",
     "the forest was full of friendly sounds"),
    ("making mistakes", "mistake", "picked up the brush", "every mistake showed what to try next"),
]
SKILLS = [
    ("ride a bicycle", "bicycle", "fell off", "kept both eyes on the road",
     "rode all the way to the corner and back"),
    ("swim", "water", "swallowed some water", "moved both arms slowly",
     "swam across the whole pond"),
    ("play the flute", "flute", "made an awful squeak", "blew very softly", "played a whole song"),
    ("bake bread", "dough", "burned the crust", "watched the oven carefully",
     "baked a warm, golden loaf"),
    ("skate", "ice", "sat down hard on the ice", "bent both knees", "glided in a big circle"),
    ("draw a horse", "paper", "drew legs that were much too short",
     "looked at a real horse for a long time", "drew a horse that seemed ready to run"),
    ("tie a strong knot", "rope", "watched the knot slip open", "went slowly, one loop at a time",
     "tied a knot that held fast"),
    ("read", "book", "mixed up the letters", "read one word at a time",
     "read the whole page aloud"),
    ("juggle", "balls", "dropped every ball", "began with only two balls",
     "kept three balls in the air"),
    ("whistle", "tune", "blew only air", "made a small round shape with the mouth",
     "whistled a clear and happy tune"),
    ("sew a button", "needle", "made a knot in the thread", "used a shorter thread",
     "sewed the button on neatly"),
    ("climb the rope", "rope", "slid down again", "held the rope with both feet",
     "touched the very top"),
    ("dance", "steps", "stepped the wrong way", "counted the steps out loud",
     "danced without a single mistake"),
    ("paddle a small boat", "boat", "went around in a circle",
     "paddled first on one side and then on the other", "went straight to the far shore"),
]
PROJECTS = [("a tree house", "boards and nails", "the floor was not level",
             "put a flat stone under one side", "sat inside and looked over the whole garden"),
            ("a raft", "logs and rope", "the logs came apart", "tied every log twice",
             "floated gently across the pond"),
            ("a kite", "paper and thin sticks", "the kite would not fly",
             "added a long tail of ribbons", "watched it rise high above the roofs"),
            ("a bird house", "an old box and some glue", "the roof fell off",
             "used small nails instead of glue", "saw a bird move in the very next day"),
            ("a snow fort", "blocks of snow", "one wall fell down",
             "made the walls thicker at the bottom", "hid inside and laughed"),
            ("a little bridge", "planks and stones", "the middle sank into the water",
             "put a big stone in the middle", "walked across without getting wet"),
            ("a wagon", "four old wheels and a crate", "one wheel kept coming off",
             "fixed the wheel with a strong pin", "rolled down the path with a cheer"),
            ("a sand castle", "wet sand and shells", "the waves washed it away",
             "built it higher up on the beach", "put a small flag on top"),
            ("a puppet theater", "cardboard and cloth", "the curtain got stuck",
             "hung the curtain on a smooth stick", "gave a show for all the neighbors"),
            ("a water wheel", "spoons and a stick", "the wheel would not turn",
             "moved it to a faster part of the stream", "watched it spin and splash"),
            ("a scarecrow", "straw and old clothes", "it kept falling over",
             "set the pole deeper in the ground", "saw that the birds left the seeds alone"),
            ("a lantern", "paper and wire", "the paper tore", "used thicker paper",
             "saw the whole room glow with soft light"), ]
ADJ_PAIRS = [("big", "small"), ("hot", "cold"), ("fast", "slow"), ("happy", "sad"),
             ("light", "dark"), ("hard", "soft"), ("loud", "quiet"), ("wet", "dry"), ("old", "new"),
             ("full", "empty"), ("high", "low"), ("early", "late"), ("strong", "weak"),
             ("open", "closed"), ("clean", "dirty"), ("near", "far"), ("thick", "thin"),
             ("heavy", "light"), ("long", "short"), ("wide", "narrow"), ("rough", "smooth"),
             ("sweet", "bitter"), ("rich", "poor"), ("brave", "afraid"), ("easy", "difficult"),
             ("right", "wrong"), ("up", "down"), ("inside", "outside"), ("first", "last"),
             ("young", "old"), ("warm", "cool"), ("deep", "shallow")]
