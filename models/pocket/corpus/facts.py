"""What the pocket model knows: short explanations, animals, opposites, sums, and the chats about
them."""
from corpus import stories
from corpus import words as W
from corpus.grammar import cast, expand

# name, plural, (group, legs, food, home, sound verb, one fact)
ANIMALS = [("cow", "cows", "mammal", 4, "grass", "on a farm", "moo", "Cows give us milk"),
           ("dog", "dogs", "mammal", 4, "meat and dog food", "with people", "bark",
            "Dogs have a very good sense of smell"),
           ("cat", "cats", "mammal", 4, "meat, fish and mice", "with people", "meow",
            "Cats can see well in dim light"),
           ("horse", "horses", "mammal", 4, "grass and hay", "on a farm", "neigh",
            "Horses can sleep standing up"),
           ("sheep", "sheep", "mammal", 4, "grass", "on a farm", "bleat",
            "We make wool from the coat of a sheep"),
           ("pig", "pigs", "mammal", 4, "almost everything", "on a farm", "oink",
            "Pigs roll in mud to stay cool"),
           ("duck", "ducks", "bird", 2, "plants and small water animals", "near ponds and lakes",
            "quack", "Ducks have feathers that keep the water out"),
           ("hen", "hens", "bird", 2, "seeds and worms", "on a farm", "cluck", "Hens lay eggs"),
           ("owl", "owls", "bird", 2, "mice and insects", "in forests and barns", "hoot",
            "Owls hunt at night"),
           ("frog", "frogs", "amphibian", 4, "insects", "near ponds", "croak",
            "A young frog is called a tadpole"),
           ("bee", "bees", "insect", 6, "nectar and pollen", "in a hive", "buzz",
            "Bees make honey from the nectar of flowers"),
           ("ant", "ants", "insect", 6, "seeds, sugar and small insects",
            "in a nest under the ground", "", "An ant can carry things much heavier than itself"),
           ("spider", "spiders", "arachnid", 8, "insects", "in a web or under stones", "",
            "Many spiders catch their food with a web"),
           ("fish", "fish", "fish", 0, "plants and smaller animals", "in water", "",
            "Fish breathe with gills"),
           ("whale", "whales", "mammal", 0, "small sea animals and fish", "in the sea", "sing",
            "The blue whale is the largest animal on earth"),
           ("dolphin", "dolphins", "mammal", 0, "fish", "in the sea", "click and whistle",
            "Dolphins come to the surface to breathe air"),
           ("elephant", "elephants", "mammal", 4, "leaves, grass and fruit", "in Africa and Asia",
            "trumpet", "An elephant uses its trunk like a hand"),
           ("lion", "lions", "mammal", 4, "meat", "in Africa", "roar",
            "Lions live in groups that are called prides"),
           ("penguin", "penguins", "bird", 2, "fish", "in the cold south", "",
            "Penguins cannot fly, but they swim very well"),
           ("snake", "snakes", "reptile", 0, "mice, eggs and frogs",
            "in forests, deserts and fields", "hiss", "A snake smells with its tongue"),
           ("turtle", "turtles", "reptile", 4, "plants and small animals", "on land or in water",
            "", "A turtle carries its shell all its life"),
           ("rabbit", "rabbits", "mammal", 4, "grass and leaves", "in burrows", "",
            "Rabbits have long ears and hear very well"),
           ("bear", "bears", "mammal", 4, "berries, fish and honey", "in forests", "growl",
            "Many bears sleep through the winter"),
           ("wolf", "wolves", "mammal", 4, "meat", "in forests and mountains", "howl",
            "Wolves hunt together in a pack"),
           ("monkey", "monkeys", "mammal", 4, "fruit, leaves and nuts", "in warm forests",
            "chatter", "Most monkeys climb very well"),
           ("camel", "camels", "mammal", 4, "dry plants", "in the desert", "",
            "A camel stores fat in its hump"),
           ("giraffe", "giraffes", "mammal", 4, "leaves from tall trees", "in Africa", "",
            "The giraffe is the tallest animal on land"),
           ("butterfly", "butterflies", "insect", 6, "nectar", "in gardens and meadows", "",
            "A butterfly begins its life as a caterpillar"),
           ("hedgehog", "hedgehogs", "mammal", 4, "worms and insects", "in gardens and hedges", "",
            "A hedgehog rolls into a ball when it is afraid"),
           ("squirrel", "squirrels", "mammal", 4, "nuts and seeds", "in trees", "",
            "Squirrels hide nuts for the winter"),
           ("crow", "crows", "bird", 2, "seeds, insects and scraps", "in trees near fields", "caw",
            "Crows are clever and can use simple tools"),
           ("bat", "bats", "mammal", 2, "insects and fruit", "in caves and old buildings", "squeak",
            "Bats find their way in the dark by listening to echoes"), ]
# topic, question, sentences
TOPICS = [
    ("the sun", "What is the sun?", [
        "The sun is a star.", "It is very hot and very bright.", "It gives us light and warmth.",
        "Without the sun, no plants could grow.",
        "The earth travels around the sun once every year.", "The sun rises in the east and sets "
        "in the west."
    ]),
    ("the moon", "What is the moon?", [
        "The moon is a ball of rock that travels around the earth.",
        "It does not make its own light.", "It shines because the sun shines on it.",
        "It takes about one month to go around the earth.", "Sometimes we see the whole moon, and "
        "sometimes only a thin piece of it."
    ]),
    ("stars", "What are stars?", [
        "Stars are huge balls of hot gas.", "Our sun is a star too.",
        "The other stars look small because they are very far away.",
        "On a clear night, we can see thousands of them.", "Sailors once used the stars to find "
        "their way."
    ]),
    ("rain", "Why does it rain?", [
        "The sun warms the water in rivers, lakes and seas.",
        "Some of the water rises into the air as vapor.",
        "High in the sky it is cold, and the vapor turns into tiny drops.",
        "Many tiny drops together make a cloud.", "When the drops become too heavy, they fall down "
        "as rain."
    ]),
    ("snow", "What is snow?", [
        "Snow is made of tiny crystals of ice.", "It forms in clouds when the air is very cold.",
        "Every snowflake has six sides.", "When it gets warm, snow melts and becomes water."
    ]),
    ("rainbows", "How is a rainbow made?", [
        "A rainbow appears when the sun shines through rain.",
        "The drops of water split the light into many colors.",
        "The colors are red, orange, yellow, green, blue and violet.",
        "To see a rainbow, the sun must be behind you."
    ]),
    ("the sky", "Why is the sky blue?", [
        "The light of the sun has many colors.", "The air scatters blue light more than red light.",
        "So blue light comes to us from every part of the sky.",
        "In the evening, the light travels a longer way through the air, and the sky looks red."
    ]),
    ("wind", "What is wind?", [
        "Wind is moving air.", "Warm air rises and cold air takes its place.",
        "This makes the air move from one place to another.",
        "Wind can move clouds, sails and the blades of a windmill."
    ]),
    ("rivers", "Where do rivers begin?", [
        "Most rivers begin in hills or mountains.",
        "Rain and melting snow run together and make a small stream.",
        "Many streams join and become a river.", "The river flows down to a lake or to the sea.",
        "People have always built towns near rivers."
    ]),
    ("the sea", "Why is the sea salty?", [
        "Rain washes tiny bits of salt out of rocks and soil.", "Rivers carry the salt to the sea.",
        "When the water rises into the air again, the salt stays behind.",
        "After millions of years, the sea has become salty."
    ]),
    ("plants", "What do plants need?", [
        "Plants need light, water, air and soil.", "They drink water through their roots.",
        "Their green leaves use light to make food.", "They also make the oxygen that we breathe."
    ]),
    ("trees", "Why are trees important?", [
        "Trees clean the air and give us shade.", "Birds and squirrels live in them.",
        "We get fruit, nuts and wood from trees.", "Their roots hold the soil in place.",
        "You can count the rings in the trunk to learn how old a tree is."
    ]),
    ("leaves in autumn", "Why do leaves change color?", [
        "In summer, leaves are full of a green "
        "substance.", "In autumn, the days grow short and cold.",
        "The tree takes the green substance back.",
        "Then we can see the yellow and red colors that were hidden.",
        "Later the leaves fall to the ground."
    ]),
    ("seeds", "How does a seed grow?", [
        "A seed holds a tiny plant and some food.", "When it gets water and warmth, it opens.",
        "First a root grows down into the soil.", "Then a small shoot grows up to the light.",
        "With time it becomes a new plant."
    ]),
    ("bread", "How is bread made?", [
        "Bread is made from flour, water, salt and yeast.",
        "First you mix everything into a dough.", "Then you knead the dough with your hands.",
        "The dough must rest until it has risen.", "At last you bake it in a hot oven."
    ]),
    ("honey", "Where does honey come from?", [
        "Honey is made by bees.", "They collect a sweet juice, called nectar, from flowers.",
        "In the hive, the bees turn the nectar into honey.",
        "They store it in small cells made of wax.", "The honey is their food for the winter."
    ]),
    ("milk", "Where does milk come from?", [
        "Most of the milk we drink comes from cows.",
        "A farmer milks the cows in the morning and in the evening.",
        "The milk is kept cold and taken to the dairy.",
        "People make butter, cheese and yogurt from milk."
    ]),
    ("paper", "How is paper made?", [
        "Paper is made from wood.", "The wood is cut into very small pieces and mixed with water.",
        "The wet mixture is spread out thin and pressed.", "When it is dry, it is paper.",
        "Old paper can be used to make new paper."
    ]),
    ("glass", "What is glass made of?", [
        "Glass is made of sand.", "The sand is heated until it melts.",
        "While it is hot, it can be blown or pressed into any shape.",
        "When it cools down, it becomes hard and clear."
    ]),
    ("computers", "What is a computer?", [
        "A computer is a machine that follows instructions.",
        "A list of instructions is called a program.",
        "A computer can count, store words and pictures, and send messages.",
        "It is very fast, but it only does what it is told."
    ]),
    ("memory in a computer", "What is memory in a computer?", [
        "Memory is the place where a computer keeps numbers and words.",
        "Some memory forgets everything when the power is off.",
        "A disk remembers for a long time.", "Everything in memory is stored as zeros and ones."
    ]),
    ("a language model", "What is a language model?", [
        "A language model is a program that has "
        "read a lot of text.", "It guesses which word comes next.",
        "By guessing one word after another, it can write a whole story.",
        "A small model knows only a little, and it can be wrong."
    ]),
    ("trains", "How does a train move?", [
        "A train runs on two steel rails.", "The engine pulls the cars behind it.",
        "Old engines burned coal and made steam.", "Today, many trains use electricity."
    ]),
    ("ships", "Why does a ship float?", [
        "A ship pushes water away.", "The water pushes back and holds the ship up.",
        "A ship is full of air, so it is lighter than the water it pushes away.",
        "That is why even a ship of steel can float."
    ]),
    ("planes", "How does a plane fly?", [
        "A plane has strong engines and two wings.", "The engines push the plane forward.",
        "The air flows over and under the wings and lifts the plane up.",
        "The pilot uses small flaps to turn."
    ]),
    ("clocks", "What does a clock do?", [
        "A clock shows the time.", "The short hand shows the hours.",
        "The long hand shows the minutes.",
        "A day has twenty-four hours, and an hour has sixty minutes."
    ]),
    ("the seasons", "What are the four seasons?", [
        "The four seasons are spring, summer, autumn "
        "and winter.", "In spring, the flowers open.", "Summer is the warmest season.",
        "In autumn, the leaves fall.", "Winter is the coldest season."
    ]),
    ("the week", "How many days are in a week?", [
        "A week has seven days.",
        "They are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
        "Saturday and Sunday are called the weekend."
    ]),
    ("the year", "How many months are in a year?", [
        "A year has twelve months.", "The first month is January and the last month is December.",
        "February is the shortest month.", "A year has three hundred and sixty-five days."
    ]),
    ("the heart", "What does the heart do?", [
        "The heart is a strong muscle.", "It pumps blood through the whole body.",
        "It beats faster when you run.", "It never stops to rest, day or night."
    ]),
    ("sleep", "Why do we sleep?", [
        "Our body rests when we sleep.", "The brain sorts what we have learned during the day.",
        "Children need more sleep than grown-ups.", "After a good sleep, we feel fresh and strong."
    ]),
    ("teeth", "Why should I brush my teeth?", [
        "Small bits of food stay on our teeth after a meal.", "They can make holes in the teeth.",
        "If you brush your teeth every morning and every evening, they stay clean and strong."
    ]),
    ("the five senses", "What are the five senses?", [
        "The five senses are sight, hearing, "
        "smell, taste and touch.", "We see with our eyes and hear with our ears.",
        "We smell with our nose and taste with our tongue.", "We feel things with our skin."
    ]),
    ("colors", "How can I mix colors?", [
        "Red, yellow and blue are good colors to begin with.", "Red and yellow make orange.",
        "Blue and yellow make green.", "Red and blue make purple.",
        "White makes a color lighter, and black makes it darker."
    ]),
    ("water", "What happens to water when it gets cold?", [
        "When water gets very cold, it "
        "becomes ice.", "Ice is hard, but it floats on water.",
        "When ice gets warm, it melts and becomes water again.",
        "When water gets very hot, it boils and becomes steam."
    ]),
    ("magnets", "What does a magnet do?", [
        "A magnet pulls things made of iron.", "Every magnet has two ends.",
        "Two ends of the same kind push each other away.", "Two different ends pull each other."
    ]),
    ("a compass", "What is a compass for?", [
        "A compass shows where north is.", "Inside it is a small needle that is a magnet.",
        "The earth is a very big magnet, and the needle turns to point north.",
        "Sailors and hikers use a compass to find their way."
    ]),
    ("volcanoes", "What is a volcano?", [
        "A volcano is a mountain with an opening.",
        "Deep in the earth, it is so hot that rock melts.",
        "Sometimes the melted rock comes out of the opening.",
        "It is called lava, and when it cools it becomes hard rock."
    ]),
    ("deserts", "What is a desert?", [
        "A desert is a place where it hardly ever rains.",
        "Many deserts are hot by day and cold by night.",
        "Only a few plants and animals can live there.", "A cactus stores water in its thick stem."
    ]),
    ("islands", "What is an island?", [
        "An island is land with water all around it.",
        "Some islands are very small, and some are as big as a country.",
        "You can reach an island by boat or by plane."
    ]),
    ("libraries", "What is a library?", [
        "A library is a place with many books.", "You can read there or take books home.",
        "You must bring the books back after some time.",
        "It is quiet in a library, so that everyone can read."
    ]),
    ("lighthouses", "What is a lighthouse for?", [
        "A lighthouse is a tall tower by the sea.", "At the top there is a very bright lamp.",
        "At night, its light shows ships where the rocks are.",
        "In this way, it guides them safely to the harbor."
    ]),
    ("friendship", "What makes a good friend?", [
        "A good friend listens to you.", "A good friend helps you and tells you the truth.",
        "Friends can be different from each other.",
        "When friends quarrel, they say sorry and make up."
    ]),
    ("shadows", "What is a shadow?", [
        "A shadow is a dark shape.", "It appears where something stands in the way of the light.",
        "In the morning and in the evening, shadows are long.", "At noon, they are short."
    ]),
    ("echoes", "What is an echo?", [
        "An echo is a sound that comes back.",
        "When you shout near a mountain, the sound hits the rock and returns to you.",
        "The farther away the mountain is, the longer you have to wait."
    ]),
    ("money", "What is money for?", [
        "We use money to buy things.", "Long ago, people traded one thing for another.",
        "Coins and bills made trading easier.",
        "If you save a little money every week, you can buy something bigger later."
    ]),
    ("maps", "What is a map?", [
        "A map is a picture of a place seen from above.",
        "Blue often means water, and green often means forest.", "Lines show roads and rivers.",
        "On most maps, north is at the top."
    ]),
    ("dinosaurs", "What were dinosaurs?", [
        "Dinosaurs were animals that lived a very long time ago.",
        "Some were as small as a hen, and some were bigger than a house.",
        "Some ate plants and some ate meat.",
        "We know about them because we have found their bones in the rock.",
        "Birds are related to dinosaurs."
    ]),
]
CAPITALS = [("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Germany", "Berlin"),
            ("Japan", "Tokyo"), ("England", "London"), ("Egypt", "Cairo"), ("Greece", "Athens"),
            ("Norway", "Oslo"), ("Portugal", "Lisbon"), ("Kenya", "Nairobi"), ("Peru", "Lima"),
            ("China", "Beijing"), ("Russia", "Moscow"), ("Poland", "Warsaw"), ("Austria", "Vienna"),
            ("Ireland", "Dublin"), ("Cuba", "Havana"), ("Canada", "Ottawa"),
            ("Sweden", "Stockholm")]
THING_COLORS = [("grass", "green"), ("snow", "white"), ("a ripe banana", "yellow"),
                ("a ripe tomato", "red"),
                ("the sky on a clear day", "blue"), ("an orange", "orange"), ("coal", "black"),
                ("milk", "white"), ("a carrot", "orange"), ("chocolate", "brown"),
                ("a lemon", "yellow"), ("a frog", "green"), ("an elephant", "grey"),
                ("blood", "red"), ("a flamingo", "pink"), ("the night", "black"),
                ("a violet", "purple")]
MIXES = [("red", "yellow", "orange"), ("blue", "yellow", "green"), ("red", "blue", "purple"),
         ("red", "white", "pink"), ("black", "white", "grey")]
LISTS = [
    ("fruits", ["apples", "pears", "plums", "cherries", "bananas", "grapes", "oranges", "peaches"]),
    ("vegetables", ["carrots", "beans", "peas", "onions", "potatoes", "cabbage", "corn",
                    "spinach"]),
    ("farm animals", ["cows", "pigs", "hens", "sheep", "goats", "horses", "ducks"]),
    ("birds", ["owls", "crows", "ducks", "sparrows", "penguins", "eagles", "robins"]),
    ("colors", ["red", "blue", "green", "yellow", "orange", "purple", "white"]),
    ("tools", ["a hammer", "a saw", "a ladder", "a needle", "a shovel", "a brush"]),
    ("things in a kitchen", [
        "a stove", "a pot", "a spoon", "a cup", "a plate", "a table", "a knife"
    ]), ("jobs", ["baker", "teacher", "doctor", "farmer", "sailor", "builder", "painter"]),
    ("things that fly", ["birds", "bees", "kites", "planes", "balloons", "butterflies"]),
    ("wild animals", ["bears", "wolves", "foxes", "lions", "elephants", "deer"]),
    ("flowers", W.FLOWERS), ("trees", ["oaks", "birches", "maples", "pines", "willows"]),
    ("musical instruments", ["a drum", "a flute", "a piano", "a violin", "a trumpet", "a guitar"]),
    ("things that are round", ["a ball", "a coin", "the moon", "a wheel", "an orange", "a plate"])
]
JOBS = [("baker", "bakes bread and cakes", "in a bakery"),
        ("teacher", "helps children learn", "at a school"),
        ("doctor", "helps people who are sick", "in a hospital"),
        ("farmer", "grows food and takes care of animals", "on a farm"),
        ("sailor", "works on a ship", "at sea"),
        ("gardener", "takes care of plants", "in a garden"),
        ("builder", "builds houses and bridges", "outdoors"),
        ("librarian", "takes care of books", "in a library"),
        ("pilot", "flies planes", "in the air"), ("fisherman", "catches fish", "on a boat"),
        ("cook", "prepares meals", "in a kitchen"),
        ("painter", "paints pictures or walls", "with a brush"),
        ("carpenter", "makes things out of wood", "in a workshop"),
        ("tailor", "sews clothes", "with a needle and thread"),
        ("shepherd", "looks after sheep", "in the hills")]
USES = [("a spoon", "eat soup"), ("an umbrella", "stay dry in the rain"), ("a key", "open a door"),
        ("a lamp", "make light"), ("a broom", "sweep the floor"), ("a hammer", "hit nails"),
        ("a ladder", "climb up high"), ("a map", "find the way"), ("a pencil", "write and draw"),
        ("a blanket", "keep warm"), ("a needle", "sew cloth"), ("a boat", "cross the water"),
        ("a bell", "call people"), ("a basket", "carry things"), ("scissors", "cut paper"),
        ("a clock", "tell the time"), ("soap", "wash your hands"), ("a mirror", "see yourself"),
        ("an oven", "bake bread"), ("a kettle", "boil water"), ("a telescope", "look at the stars"),
        ("a saw", "cut wood")]
HOWTO = [
    ("make tea", [
        "Boil some water.", "Put a tea bag into a cup.", "Pour the hot water into the cup.",
        "Wait for three minutes.", "Take out the tea bag and add some honey."
    ]),
    ("plant a seed", [
        "Fill a small pot with soil.", "Make a little hole with your finger.",
        "Put the seed into the hole and cover it.", "Give it some water.",
        "Put the pot in a sunny place and wait."
    ]),
    ("wash your hands", [
        "Turn on the water.", "Wet your hands and take some soap.",
        "Rub your hands together for twenty seconds.", "Wash the soap off.",
        "Dry your hands with a towel."
    ]),
    ("make a sandwich", [
        "Take two slices of bread.", "Put some butter on each slice.",
        "Add cheese and a few leaves of salad.", "Put the slices together.",
        "Cut the sandwich in half and enjoy it."
    ]),
    ("make a snowman", [
        "Roll a big ball of snow.", "Roll a smaller ball and put it on top.",
        "Make one more ball for the head.", "Use stones for the eyes and a carrot for the nose.",
        "Give it a hat and a scarf."
    ]),
    ("make a paper boat", [
        "Fold a sheet of paper in half.", "Fold the two top corners to the "
        "middle.", "Fold up the edges at the bottom.", "Open it and press it flat into a square.",
        "Pull the sides apart, and the boat is ready."
    ]),
    ("clean your room", [
        "Open the window.", "Put all the toys into the box.", "Put the books on the shelf.",
        "Make the bed.", "Sweep the floor."
    ]),
    ("cook an egg", [
        "Put some water into a small pot.", "Wait until the water boils.",
        "Put the egg in with a spoon.", "Cook it for six minutes.",
        "Cool it with cold water and take off the shell."
    ]),
    ("wrap a gift", [
        "Put the gift in the middle of the paper.", "Fold the paper over the gift.",
        "Close it with a piece of tape.", "Fold the ends and tape them too.",
        "Tie a ribbon around it."
    ]),
    ("learn a song", [
        "Listen to the song a few times.", "Read the words aloud.",
        "Sing the first line again and again.", "Add one line after the other.",
        "Sing the whole song every day."
    ]),
    ("make a good friend", [
        "Say hello and smile.", "Ask a question and listen to the answer.",
        "Share something you like.", "Be honest and kind.", "Take your time."
    ]),
    ("take care of a dog", [
        "Give it fresh water and food every day.", "Take it for a walk.", "Brush its coat.",
        "Play with it.", "Give it a warm place to sleep."
    ]),
]
FEEL = [("sad", [
    "I am sorry to hear that.", "It is all right to be sad.", "Would you like to talk about it?",
    "Sometimes a walk or a warm drink helps.", "A hug from a friend can help too."
]),
        ("happy", [
            "That is wonderful!", "I am glad to hear it.", "What made you so happy?",
            "Share your joy with a friend, and it will grow."
        ]),
        ("tired", [
            "Then you should rest.", "Drink some water and close your eyes for a while.",
            "A good sleep makes you strong again.", "Tomorrow is a new day."
        ]),
        ("bored", [
            "You could draw a picture or read a book.",
            "Maybe you could build something from old boxes.",
            "Go outside and count how many birds you can see.", "Would you like to hear a story?"
        ]),
        ("afraid", [
            "Everyone is afraid sometimes.", "Take a deep breath.",
            "Tell someone you trust about it.", "A fear grows smaller when you talk about it."
        ]),
        ("angry", [
            "Take a deep breath and count to ten.", "Try to say what happened without "
            "shouting.", "When you are calm, you can look for a solution.",
            "It helps to talk about it."
        ]),
        ("hungry", [
            "Then it is time to eat something.", "An apple or a piece of bread is a "
            "good snack.", "Maybe you can cook some soup."
        ]),
        ("lonely", [
            "I am glad that you are talking to me.", "Maybe you can call a friend.",
            "You could also visit a neighbor.",
            "Someone else may feel lonely too and would be happy to see you."
        ]),
        ("nervous", [
            "That is normal before something important.",
            "Breathe slowly and think of what you have practiced.",
            "You do not need to be perfect.", "I am sure you will do well."
        ])]
RHYMES = [
    "The {little|small|tiny} cat {sat down|slept well} at night\nbeside the {window|fire} warm "
    "and bright.",
    "The rain came down upon the {tree|sea},\nand {every|one small} bird flew {home|back} to me.",
    "A {star|lamp} was shining {soft|far} and clear,\nit {told|showed} the sailor: land is near.",
    "The {fox|mouse} went out to {find|seek} some bread,\n"
    "but found a {silver|golden} moon instead.",
    "The wind went {singing|running} down the hill,\nand {then|soon} the {night|world} was dark "
    "and still.",
    "The {river|water} runs, the {river|water} sings,\nit {tells|knows} of {many|a hundred} "
    "{hidden|lovely} things.",
    "When {winter|autumn} comes and days are cold,\nwe {tell|share} the stories {we were "
    "told|that are old}.",
    "A seed lay {sleeping|hidden} in the ground,\nit {grew and grew|woke up} without a sound.",
    "My {kite|boat} is {red|blue}, my {kite|boat} is {new|fast and true},\nI {made|built} it "
    "{yesterday|myself} for you.",
    "The {owl|frog} sat on {a stone|the wall} all day,\nand {watched|heard} the "
    "{children|others} laugh and play.",
]


def say_n(rng, n):
    return W.NUMBERS[n] if n <= 20 and rng.random() < 0.2 else str(n)


def pick(rng, items, lo, hi):
    """The first few of the items: later sentences lean on earlier ones."""
    return items[:min(len(items), rng.randint(lo, hi))]


# --- single turns: each returns (question, answer) ---


def q_sum(rng):
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    if rng.random() < 0.5:
        ask = expand(
            rng, f"{{What is|How much is|Can you tell me what is|Please "
            f"add:|Calculate}} {a} {{plus|+}} {b}{{?|?}}")
        return ask, expand(
            rng, f"{{{a} plus {b} is {a + b}.|The answer is {a + b}.|{a} + {b} = "
            f"{a + b}.|That is {a + b}.}}")
    a, b = max(a, b), min(a, b)
    ask = expand(rng, f"{{What is|How much is|Can you tell me what is}} {a} {{minus|-}} {b}?")
    return ask, expand(
        rng, f"{{{a} minus {b} is {a - b}.|The answer is {a - b}.|{a} - {b} = "
        f"{a - b}.|That is {a - b}.}}")


def q_word_sum(rng):
    n = cast(rng)
    a, b = rng.randint(2, 9), rng.randint(1, 6)
    thing = rng.choice("apples nuts coins books shells cookies stones flowers pencils cups "
                       "berries eggs".split())
    n.update(a=a, b=b, s=a + b, thing=thing)
    if rng.random() < 0.5:
        return (expand(
            rng, "$N has $a $thing. $N2 gives $him $b more. How many $thing does $N "
            "have now?", n),
                expand(
                    rng, "{First|At first,} $N had $a $thing. Then $he got $b more. $a plus "
                    "$b is $s, so $N has $s $thing{ now|}.", n))
    a, b = max(a, b), min(a, b)
    n.update(a=a, b=b, d=a - b)
    return (expand(
        rng, "$N has $a $thing. $He gives $b of them to $N2. How many $thing {are "
        "left|does $N still have}?", n),
            expand(
                rng, "$N had $a $thing and gave away $b. $a minus $b is $d, so {$N has $d "
                "$thing left|$d $thing are left}.", n))


def q_animal(rng):
    one, many, group, legs, food, home, sound, fact = rng.choice(ANIMALS)
    kinds = ["eat", "live", "fact", "group"] + (["legs"]) + (["sound"] if sound else [])
    kind = rng.choice(kinds)
    if kind == "eat":
        return f"What do {many} eat?", expand(rng, f"^{many} eat {food}. {{{fact}.|}}")
    if kind == "live":
        return f"Where do {many} live?", expand(
            rng, f"^{many} live {home}. {{{fact}.|^they eat "
            f"{food}.|}}")
    if kind == "legs":
        word = "no legs" if legs == 0 else f"{W.NUMBERS[legs]} legs"
        return f"How many legs does a~ {one} have?".replace(
            "a~ " + one, ("an " if one[0] in "aeiou" else "a ") + one), expand(
                rng, f"A~ {one} has {word}. {{{fact}.|}}")
    if kind == "sound":
        return expand(rng, f"What sound {{do {many} make|does a~ {one} make}}?"), expand(
            rng, f"^{many} {sound}. {{{fact}.|}}")
    if kind == "group":
        return expand(rng, f"What kind of animal is a~ {one}?"), expand(
            rng, f"A~ {one} is a~ {group}. {{{fact}.|It eats {food}.|}}")
    return (expand(
        rng, f"{{Tell me {{something|a fact}} about {many}.|What do you know about "
        f"{many}?}}"),
            expand(
                rng, f"{fact}. {{^{many} live {home}|They live {home}}}, and they eat "
                f"{food}. {{A~ {one} is a~ {group}.|}}"))


def q_topic(rng):
    name, ask, lines = rng.choice(TOPICS)
    r = rng.random()
    ask = ask if r < 0.5 else expand(
        rng, f"{{Tell me about {name}.|Can you explain "
        f"{name}?|Explain {name}, please.|What do you know "
        f"about {name}?|I want to learn about {name}.}}")
    return ask, " ".join(pick(rng, lines, 2, len(lines)))


def q_opposite(rng):
    a, b = rng.choice(W.ADJ_PAIRS)
    return (expand(rng, f"What is the opposite of {{{a}|\"{a}\"}}?"),
            expand(rng, f"The opposite of {a} is {b}."))


def q_capital(rng):
    c, t = rng.choice(CAPITALS)
    return expand(
        rng, f"{{What is the capital of {c}?|Which city is the capital of {c}?|Do you "
        f"know the capital of {c}?}}"), expand(
            rng, f"{{The capital of {c} is {t}.|It is {t}.|{t} is the capital of {c}.}}")


def q_color(rng):
    if rng.random() < 0.4:
        a, b, c = rng.choice(MIXES)
        return f"What color do I get when I mix {a} and {b}?", expand(
            rng, f"{{When you mix {a} and {b}, you get {c}.|You get {c}.|^{a} and {b} make {c}.}}")
    t, c = rng.choice(THING_COLORS)
    return f"What color is {t}?", expand(rng, f"^{t} is {c}.")


def q_list(rng):
    name, items = rng.choice(LISTS)
    k = rng.randint(2, 5)
    got = rng.sample(items, min(k, len(items)))
    k = len(got)
    return (expand(rng, f"{{Name|List|Tell me|Give me}} {W.NUMBERS[k]} {name}."),
            (", ".join(got[:-1]) + " and " + got[-1] +
             ".").capitalize() if rng.random() < 0.6 else f"Here are {W.NUMBERS[k]} {name}:\n" +
            "\n".join(f"{i + 1}. {g[0].upper() + g[1:]}" for i, g in enumerate(got)))


def q_job(rng):
    j, does, where = rng.choice(JOBS)
    art = "an" if j[0] in "aeiou" else "a"
    return f"What does {art} {j} do?", expand(
        rng, f"A~ {j} {does}{{.|, often {where}.|. You "
        f"can meet a~ {j} {where}.}}" if where.startswith(
            ("in a", "at", "on")) else f"A~ {j} {does}.")


def q_use(rng):
    t, use = rng.choice(USES)
    verb = "are scissors" if t == "scissors" else f"is {t}"
    return expand(rng, f"{{What {verb} for?|What can I do with {t}?}}"), expand(
        rng, f"{{You can use {t} to {use}.|People use {t} to {use}.|With {t}, you can {use}.}}")


def q_howto(rng):
    what, steps = rng.choice(HOWTO)
    steps = list(steps)
    ask = expand(
        rng, f"{{How do I {what}?|How can I {what}?|Can you tell me how to {what}?|I "
        f"want to {what}. What should I do?}}")
    if rng.random() < 0.5:
        return ask, "\n".join(f"{i + 1}. {s}" for i, s in enumerate(steps))
    words = ["First, ", "Then ", "Next, ", "After that, ", "At last, "]
    return ask, " ".join(w + s[0].lower() + s[1:] for w, s in zip(words, steps))


def q_feel(rng):
    mood, lines = rng.choice(FEEL)
    why = rng.choice([
        "", "", " I lost my favorite {book|toy|hat}.", " My friend moved away.",
        " Tomorrow is my first day at {school|work}.", " It has been a long day."
    ])
    if mood in ("happy", "hungry", "bored"):
        why = ""
    k = rng.randint(2, min(3, len(lines)))
    return expand(
        rng, f"{{I am {mood}{{ today|}}.|I feel {mood}.|I am feeling {mood}{{ right "
        f"now|}}.}}{why}"), " ".join([lines[0]] + rng.sample(lines[1:], k - 1))


def q_hello(rng):
    return (expand(
        rng, "{Hello|Hi|Good morning|Good evening|Hello there|Hey}{!|.|, how are "
        "you?|! How are you{ today|}?}"),
            expand(
                rng, "{Hello|Hi|Hello there}! {I am {fine|well}, thank you.|It is nice to "
                "meet you.|I am glad you are here.|} {How can I help you{ today|}?|What "
                "would you like to talk about?|Would you like to hear a story?}"))


def q_self(rng):
    return rng.choice(
        [("Who are you?", "I am Pocket, a very small language model. I can tell short stories "
          "and answer simple questions."),
         ("What is your name?",
          expand(rng, "My name is Pocket.{ I am a small language model.| "
                 "What is your name?|}")),
         ("What can you do?", "I can tell short stories, answer simple questions, add small "
          "numbers and talk with you."),
         ("Are you a human?", "No, I am a small language model. I am a program that writes one "
          "word after another."),
         ("How old are you?", "I am a program, so I do not have a birthday like you."),
         ("Do you know everything?", "No, I am very small and I know only a little. I can also "
          "be wrong."), ("Can you help me?", "Yes, I will try. What do you need?"),
         ("Do you like stories?", "Yes, I like stories very much. Would you like to hear one?")])


def q_thanks(rng):
    return (expand(
        rng, "{Thank you{!| very much!|.}|Thanks{!| a lot!}|That was {nice|helpful}. "
        "Thank you!}"),
            expand(
                rng, "You are welcome! {I am glad I could help.|Have a nice day!|Do you have "
                "another question?|Come back any time.|}"))


def q_bye(rng):
    return expand(
        rng, "{Goodbye{!|.}|Good night{!|.}|Bye!|I have to go now.|See you later!}"), expand(
            rng,
            "Goodbye! {Have a good day.|Sleep well.|See you soon!|Take care!|It was nice to talk "
            "with you.}")


def q_poem(rng):
    return expand(
        rng,
        "{Write|Tell me|Make} a {short|little|} {poem|rhyme}{.|, please.| for me.}"), "\n".join(
            expand(rng, t) for t in rng.sample(RHYMES, rng.randint(1, 3)))


def q_next(rng):
    if rng.random() < 0.5:
        seq = rng.choice([W.DAYS, W.MONTHS])
        i = rng.randrange(len(seq))
        w = rng.choice(["after", "before"])
        j = (i + (1 if w == "after" else -1)) % len(seq)
        return f"What {'day' if seq is W.DAYS else 'month'} comes {w} {seq[i]}?", expand(
            rng, f"{seq[j]} comes {w} {seq[i]}.")
    a = rng.randint(0, 60)
    if rng.random() < 0.5:
        return f"What number comes after {a}?", f"The number after {a} is {a + 1}."
    k = rng.randint(3, 12)
    return f"Count {'to' if rng.random() < .9 else 'up to'} {k}.", ", ".join(
        str(i) for i in range(1, k + 1)) + "."


def q_bigger(rng):
    if rng.random() < 0.5:
        a, b = rng.sample(range(0, 100), 2)
        return f"Which is bigger, {a} or {b}?", expand(
            rng, f"{max(a, b)} is bigger than "
            f"{min(a, b)}.")
    order = [
        "an ant", "a bee", "a mouse", "a rabbit", "a dog", "a sheep", "a horse", "an elephant",
        "a whale"
    ]
    i, j = sorted(rng.sample(range(len(order)), 2))
    w = rng.choice(["bigger", "smaller"])
    x, y = (order[j], order[i]) if w == "bigger" else (order[i], order[j])
    p, q = rng.sample([x, y], 2)
    return f"Which is {w}, {p} or {q}?", f"{x[0].upper() + x[1:]} is {w} than {y}."


def q_sentence(rng):
    n = cast(rng)
    word, s = rng.choice([("happy", "$N was happy because $N2 came to visit."),
                          ("river", "The river runs past {the old mill|$town}."),
                          ("bread", "$N3 baked fresh bread this morning."),
                          ("rain", "After the rain, the air smelled fresh."),
                          ("book", "$N read a~ {good|thick|funny} book under the $tree."),
                          ("friend", "$N2 is a~ {good|kind|$trait} friend."),
                          ("moon", "The moon was bright over $land."),
                          ("garden", "There are $flower in the garden."),
                          ("slowly", "The turtle walked slowly across the road."),
                          ("window", "$N opened the window and listened to the birds."),
                          ("snow", "The snow was deep and white."),
                          ("lamp", "$N3 turned on the lamp.")])
    return expand(rng, f"{{Make|Write}} a sentence with the word \"{word}\"."), expand(rng, s, n)


def q_story(rng):
    """A request that names the hero and the topic, and a story that obeys."""
    topic = rng.choice(list(stories.PLOTS))
    sex = rng.choice("mf")
    if rng.random() < 0.5 and topic not in ("a robot", "a show"):
        noun = rng.choice(W.BEASTS)
        name = rng.choice(W.BEAST_NAMES[sex])
    else:
        noun = "boy" if sex == "m" else "girl"
        name = rng.choice(W.CHILD_NAMES[sex])
    art = "an" if noun[0] in "aeiou" else "a"
    hero = (name, sex, f"{art} {noun}", noun)
    text, topic, _ = stories.story(rng, topic, hero)
    r = rng.random()
    if r < 0.4:
        ask = expand(
            rng, f"{{Tell me|Write|Please tell me|Can you tell me}} a {{short |little "
            f"|}}story about {{a~ {noun}|a~ {noun} named {name}|{name}, a~ "
            f"{noun},}} and {topic}.")
    elif r < 0.7:
        ask = expand(
            rng, f"{{Tell me|Write|Please tell me}} a {{short |little |}}story about "
            f"{{a~ {noun}|a~ {noun} named {name}|a~ {noun} called {name}}}.")
    elif r < 0.9:
        ask = expand(
            rng, f"{{Tell me|Write|Please tell me|I would like to hear}} a {{short "
            f"|little |}}story about {topic}.")
    else:
        ask = expand(
            rng, "{Tell me a story.|Can you tell me a story?|Tell me a bedtime story, "
            "please.|I would like to hear a story.}")
    if ask.startswith("Can you"):
        ask = ask.rstrip(".?") + "?"
    intro = expand(rng, "{|||Here is a {short |little |}story.\n\n|Of course.\n\n}")
    return ask, (intro + "\n\n" if intro else "") + text


def q_read(rng):
    """A short passage and a question about it."""
    n = cast(rng)
    n["spot"] = rng.choice(W.INDOOR_SPOTS)
    lines = [
        (f"$N has a~ $toy.", "What does $N have?", "$N has a~ $toy."),
        (f"$N2 lives in $home.", "Where does $N2 live?", "$N2 lives in $home."),
        (f"$N3 is a~ $noun3.", "What is the job of $N3?", "$N3 is a~ $noun3."),
        (f"$N likes $food, but $N2 likes $food2.", "What does $N2 like?", "$N2 likes $food2."),
        (f"On $day, $N went to $land.", "Where did $N go on $day?", "On $day, $N went to $land."),
        (f"The $thing of $N2 was $spot.", "Where was the $thing of $N2?", "It was $spot."),
        (f"$N2 wore a~ $color2 hat.", "What color was the hat of $N2?", "The hat was $color2."),
    ]
    lines = [
        l for l in lines if n["noun3"] not in ("grandmother", "grandfather") or "noun3" not in l[0]
    ]
    got = rng.sample(lines, rng.randint(2, 4))
    q = rng.choice(got)
    body = " ".join(expand(rng, l[0], n) for l in got)
    return expand(rng, "{Read this:|Here is a text:|} ") + " " + body + " " + expand(
        rng, q[1], n), expand(rng, q[2], n)


TURNS = [(q_sum, 8), (q_word_sum, 6), (q_animal, 10), (q_topic, 12),
         (q_opposite, 4), (q_capital, 4), (q_color, 4), (q_list, 5), (q_job, 3), (q_use, 4),
         (q_howto, 5), (q_feel, 6), (q_hello, 4), (q_self, 4), (q_poem, 5), (q_next, 4),
         (q_bigger, 3), (q_sentence, 4), (q_story, 26), (q_read, 8)]
FUNCS, WEIGHTS = [f for f, _ in TURNS], [w for _, w in TURNS]
SYSTEMS = [
    "You are a helpful assistant.", "You are Pocket, a small and friendly assistant.",
    "Answer in short, simple sentences."
]


def chat(rng):
    """One chat as ChatML text."""
    turns = []
    if rng.random() < 0.12:
        turns.append(q_hello(rng))
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        turns.append(rng.choices(FUNCS, WEIGHTS)[0](rng))
    if rng.random() < 0.15:
        turns.append(q_thanks(rng))
    if rng.random() < 0.08:
        turns.append(q_bye(rng))
    out = []
    if rng.random() < 0.25:
        out.append(("system", rng.choice(SYSTEMS)))
    for q, a in turns:
        out += [("user", q.strip()), ("assistant", a.strip())]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in out)


# --- plain text that is not a story ---


def essay(rng):
    """Two or three topics, or one animal, as plain prose."""
    if rng.random() < 0.3:
        one, many, group, legs, food, home, sound, fact = rng.choice(ANIMALS)
        word = "no legs" if legs == 0 else f"{W.NUMBERS[legs]} legs"
        lines = [
            f"A~ {one} is a~ {group}.", f"It has {word}.", f"^{many} live {home}.",
            f"They eat {food}.", f"{fact}."
        ]
        if sound:
            lines.append(f"^{many} {sound}.")
        head = lines[:1]
        rest = lines[1:]
        rng.shuffle(rest)
        return " ".join(expand(rng, s) for s in head + rest[:rng.randint(3, 5)])
    if rng.random() < 0.15:
        c = rng.sample(CAPITALS, 4)
        return " ".join(
            expand(rng, f"{{The capital of {a} is {b}.|{b} is the capital of {a}.}}") for a, b in c)
    out = []
    for name, _, lines in rng.sample(TOPICS, rng.choice([1, 1, 2])):
        out.append(" ".join(pick(rng, lines, 3, len(lines))))
    return "\n\n".join(out)


def talk(rng):
    """A little dialogue as in a play."""
    n = cast(rng)
    a = "$N: {Good morning|Hello|Hi}, $N2! {How are you|What are you doing|Where are you going}?\n"
    b = ("$N2: {Hello, $N!|Hi!} {I am {fine|a little tired}, thank you.|I am {going to "
         "$land|making {$food|a~ $toy}|looking for my $thing}.}\n")
    more = rng.choice(
        [[
            "$N: {May I come with you|Can I help you}?\n", "$N2: {Of course|Yes, please}. {Two "
            "friends are better than one|That would "
            "be nice}. {Do you have time|Are you "
            "ready}?\n",
            "$N: {Yes, I have the whole {day|afternoon}|I only have to be home before dark}. {What "
            "do we need|What should I bring}?\n", "$N2: {A rope and some $food|Only a basket|A "
            "warm coat, because it is cold}. {Let us go|Come "
            "on}!\n"
        ],
         [
             "$N: {Did you hear the news|Have you heard}? $N3 {is back|has a new $toy|is baking "
             "$food for everyone}.\n", "$N2: {Really|Is that true}? {I did not know that|That is "
             "wonderful}!\n",
             "$N: {Yes, I saw it myself|Everyone is talking about it}. {Shall we go and see|Do you "
             "want to come along}?\n", "$N2: {Let us go right now|I would love to|Wait, I will get "
             "my coat}.\n"
         ],
         [
             "$N: {What is your favorite food|What do you like to eat best}?\n",
             "$N2: {I like $food best|My favorite is $food}. {And you|What about you}?\n",
             "$N: {I like $food2|For me it is $food2}. {My grandmother makes it every $day|We eat "
             "it every $day}.\n", "$N2: {That sounds good|Now I am hungry}. {Let us cook something "
             "together|May I try it one day}?\n", "$N: {Yes, come on $day|Of course}!\n"
         ],
         [
             "$N: {I had a strange dream last night|Last night I had a dream}.\n",
             "$N2: {Tell me about it|What was it about}.\n",
             "$N: {I was as small as a~ {bee|nut|button}, and I rode on a~ $animal|I could talk to "
             "a~ $animal, and it told me where to find a~ $toy|I was flying over $land}.\n",
             "$N2: {Were you afraid|And what happened then}?\n", "$N: {Not at all, it was "
             "wonderful|Then I woke up, and it "
             "was morning}.\n"
         ],
         [
             "$N: {I cannot find my $thing|I have lost my $thing}. {Have you seen it|Did you take "
             "it}?\n", "$N2: {What does it look like|Is it the $color one}?\n",
             "$N: It is a~ $toy.\n",
             "$N2: {I think I saw it near $land|Look behind you|$N3 found it this morning}.\n",
             "$N: {Oh, thank you|You are right! Thank you}, $N2!\n"
         ],
         [
             "$N: {Will it rain today|What will the weather be like}?\n",
             "$N2: {Look at the clouds|The sky is grey}. {I think it will rain|There will be a "
             "storm in the evening}.\n",
             "$N: {Then we should stay inside|Then I need my umbrella}.\n",
             "$N2: {We could read a book|We could play a game|We could bake $food}. {What do you "
             "think|Would you like that}?\n", "$N: {Good idea|I would like that}!\n"
         ], ])
    return "".join(expand(rng, s, n) + "\n" for s in [a, b] + more).strip()


def diary(rng):
    n = cast(rng, beasts=0.0)
    parts = [
        "{Today was|This was} {a good|a long|a quiet|an exciting|a strange} day.", "$weather",
        "{In the morning|After breakfast}, I {went to $land|helped $N3 in the garden|walked to "
        "school with $N2|ate $food}.",
        "{On the way|There}, I saw {a~ $animal|a~ $color {boat|bird|door}|my friend $N2}. {It "
        "made me smile|I stopped and looked for a while}.",
        "{At noon|Later}, {we ate $food|I read a book|it began to rain|$N2 came to visit}.",
        "{In the afternoon|Then}, {$N2 and I {built a~ small boat|played near $land|looked for "
        "my $toy}|I learned how to {bake bread|tie a knot|draw a horse}}.",
        "{It was {fun|hard|more difficult than I thought}, but {I did not give up|we laughed a "
        "lot|I want to try it again}.|I was a little {tired|nervous}, but {happy|proud}.}",
        "{In the evening|Before bed}, {I watched the stars|I wrote a letter to $N3|we sat by "
        "the fire}. {Tomorrow I want to {see $N2|go to the sea|finish my picture}|I hope the "
        "sun will shine tomorrow|I am happy to be home}.",
    ]
    head = expand(rng, "{$day\n\n|Dear diary,\n\n|}", n)
    keep = [parts[0]] + [p for p in parts[1:-1] if rng.random() < 0.75] + [parts[-1]]
    return head + ("\n\n" if head else "") + " ".join(expand(rng, p, n) for p in keep)


def letter(rng):
    n = cast(rng, beasts=0.0)
    parts = [
        "{Thank you for your {letter|gift|visit}.|How are you? I am {well|fine}.|I hope "
        "you are well.|I have not written for a long time.}",
        "{Here in $town, everything is {quiet|as always}.|We have moved to $home.|$weather}",
        "{Last $day|Yesterday}, {$N2 and I went to $land|we had a storm|there was a fair|I "
        "found a~ $toy}. {You should have seen it|It was {wonderful|so funny}|I thought of "
        "you}.", "{Do you remember {the $tree behind the house|our walk to $land}?|I have a new "
        "{friend|pet|book}.} {It is {still there|very nice}.|I will tell you more when you "
        "come.}", "{Please come and visit us {soon|in $season}.|I miss you.|Write to me soon.} {We "
        "will bake $food together|I will show you everything}."
    ]
    return expand(rng, "Dear $N3,", n) + "\n\n" + " ".join(
        expand(rng, p, n) for p in parts if rng.random() < 0.9) + "\n\n" + expand(
            rng, "{Love|Your friend|With love|Best wishes},\n$N", n)


def place(rng):
    n = cast(rng)
    parts = [
        "{There is|I know} $town. {It is not on every map|Not many people know it}, but "
        "{it is a good place|I like it very much}.",
        "{In the middle|At the end of the road} stands {an old $tree|a well|a clock "
        "tower|a small church|a~ $color house}.",
        "{Next to it|Behind it}, {$N3 has a shop|there is a garden full of $flower|a "
        "narrow path leads to $land}.",
        "{In the morning|Early in the day}, {the air smells of {bread|wet grass}|the bells "
        "ring|you can hear the birds}. {In the evening|At night}, {the windows glow|the "
        "lamps are lit|everything is still}.",
        "{In $season|On $day}, {there is a market|everyone meets near $land|the children "
        "{fly kites|play in the streets}}. {You can buy $food and $food2|There is music, "
        "and people dance|Even $N, the $noun, comes to look}.",
        "{If you ever go there|When you visit}, {say hello to $N3|try the $food|do not "
        "forget to look up at the sky}."
    ]
    return " ".join(
        expand(rng, p, n) for p in [parts[0]] + [p for p in parts[1:] if rng.random() < 0.8])


PLAIN = [(essay, 20), (talk, 22), (diary, 22), (letter, 16), (place, 20)]


def plain(rng):
    return rng.choices([f for f, _ in PLAIN], [w for _, w in PLAIN])[0](rng)


# --- two or three short sentences that use the same name or thing again: the shortest texts in
# which one has to look back ---

NOTES = [
    "$N has a~ $toy. The $thing belongs to $N.", "$N is a~ $noun. {Everyone likes|We all know} $N.",
    "\"{Hello|Good morning}, $N!\" said $N2. \"Hello, $N2!\" said $N.",
    "$N lost $his $thing. {Who found the $thing|Where is the $thing}? $N found the $thing.",
    "This is $N. {$N lives in $home|$N likes $food}. {Hello|Goodbye}, $N!",
    "{Where is|Have you seen} $N? $N is {at home|near $land|in the garden}. $N {is reading|is "
    "tired|will come soon}.",
    "My name is $N. {$N is a good name|I am $N, the $noun|Please call me $N}.",
    "$N: Hello!\n$N2: Hi!\n$N: {How are you|What is new}?\n$N2: {I am fine|Not much}.\n$N: "
    "{Good|I see}.\n$N2: Goodbye, $N!\n$N: Goodbye, $N2!",
    "$N {called|saw|met} $N2. $N2 {smiled at|waved to|ran to} $N. $N and $N2 {are friends|went "
    "to $land|played together}.",
    "The $toy is {lost|new|here}. $N {wants|likes|found} the $thing. The $thing is "
    "{pretty|$color}, {said|says} $N.",
    "I know a~ $noun named $N. $N is $trait. {One day|Today}, $N went to $land. $N {was "
    "happy|came back in the evening}.",
    "\"I am $N,\" said the $noun. \"{Nice to meet you|Come in}, $N,\" said $N3. $N3 "
    "{smiled|laughed}, and so did $N.",
    "$N likes $food. {What does $N like? $N likes|Give $N some} $food.",
    "A~ $animal {sat near|ran to|slept beside} $N. $N gave the $animal some $food. The $animal "
    "{liked|trusted} $N.",
]


def note(rng):
    n = cast(rng)
    return expand(rng, rng.choice(NOTES), n)
