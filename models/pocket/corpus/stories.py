"""Short stories: an opening, a problem, some tries, a resolution, an ending.

Each plot is a function (rng, names) -> list of paragraphs (each a list of templates). `PLOTS` maps
a plot's topic, as a reader would ask for it, to the function. Templates use the names of
grammar.cast(): $N is the hero, $M-like names carry a suffix: $N2 the friend, $N3 the grown-up.
"""
from corpus import words as W
from corpus.grammar import cast, expand

OPENINGS = [
    "{Once upon a time, there was|There once was|Long ago, there lived} $kind {named|called} $N.",
    "{Once upon a time|Long ago|Many years ago}, in $town, there lived $kind {named|called} $N.",
    "$N was $kind who lived in $home.",
    "$N was $kind. $He lived in $home {with $his family|near $land|}.",
    "In $town lived $kind {named|called} $N.",
    "There was $kind {named|called} $N who {loved|liked} {$season|to sing|to explore|$food|to "
    "ask questions|rainy days|to play outside} more than anything {else|in the world}.",
    "{One day|One morning|One $day|One $season morning|One evening}, $kind {named|called} $N "
    "{was walking near $land|was sitting by the window|woke up very early|went out to play}.",
    "$kind {named|called} $N lived in $home. Everyone {said|knew} that $he was {very|always} "
    "$trait.",
    "$N and $N2 were {best friends|good friends|neighbors}. $N was {a~ $noun|$kind} and $N2 was "
    "{a~ $noun2|$kind2}.",
    "$weather $N{, $kind,|} {was outside|looked out of the window|was ready for a new day|could "
    "hardly wait to go outside}.",
]
DAILY = [
    "Every {day|morning|afternoon}, $he {walked to $land|helped {at home|in the garden|in the "
    "kitchen}|played with $his friends|ate $food and drank warm milk}.",
    "$He had {a~ $toy|a~ $color {blanket|bag|coat}|a small garden} that $he {loved very "
    "much|took care of every day}.", "$His best friend was $N2, $kind2.",
    "$He {liked|loved} to {watch the clouds|collect smooth stones|listen to old stories|count "
    "the stars|pick $flower|climb the $tree}.",
    "$He was {often|usually|sometimes} $trait, {and everyone liked $him for it|and that was a "
    "good thing|but not always}.", "", "",
]
ENDINGS = [
    "From that day on, {$N and $N2 were {the best of friends|always together}|$he {never forgot "
    "what $he had learned|was a little braver|always asked for help when $he needed it}}.",
    "$N {went home|fell asleep} {that night|that evening} with {a big smile|a happy heart|a "
    "warm feeling inside}.",
    "And {everyone was happy|they all lived happily ever after|that was the best day of the "
    "{week|year|whole $season}}.",
    "\"{What a day|This was a good day|I will never forget this day}!\" said $N{, and $he "
    "{laughed|smiled}|}.",
    "{That evening|Later|Before bed}, $N told {$N3|$his mother|$his father|$his family} the "
    "whole story{, and they {laughed|smiled} together|}.",
    "{They sat together|$N and $N2 sat} {under the $tree|by the fire|near $land} and shared "
    "{some $food|$food and tea} {until the stars came out|until it was time to go home|}.",
    "$N {learned|now knew} that {it is good to be $trait|a small act of kindness can change a "
    "whole day|friends make every problem smaller|trying again is how we learn}.",
    "{The sun went down|The moon came up} over $land, and {it was time to sleep|everything was "
    "quiet again|all was well}.",
]
LESSONS = {
    "lost": "{$N learned|$He learned} to {put things back in their place|look carefully before "
    "giving up|stay calm when something is lost}.",
    "fear": "$N {learned|understood} that {being brave does not mean having no fear|a fear "
    "grows small when you look at it closely}.",
    "help": "{$N knew|$He knew} that {helping others makes the heart feel light|even small "
    "hands can do great things}.",
    "truth": "$N {learned|understood} that {telling the truth is hard at first but easy "
    "afterwards|the truth is lighter than a secret}.",
    "share": "$N {learned|found out} that {things are more fun when they are shared|a shared "
    "meal tastes better}.",
    "work": "$N {learned|understood} that {good work takes time|a mistake is only a step on the "
    "way}.",
}


def maybe(rng, p, text):
    return text if rng.random() < p else ""


def opening(rng):
    first = rng.choice(OPENINGS)
    # two names just came up: $He would be unclear
    if "$N2" in first:
        return [
            "^" + first,
            maybe(
                rng, 0.6, "They {played together every day|liked to play "
                "near $land|often {walked to $land|shared $food} "
                "together|"
                "had been friends for a long time}.")
        ]
    return ["^" + first, *rng.sample(DAILY, 2 if rng.random() < 0.3 else 1)]


def ending(rng, lesson=None):
    out = []
    if lesson and rng.random() < 0.45:
        out.append(LESSONS[lesson])
    out.append(rng.choice(ENDINGS))
    return out


def feeling(kind):
    if kind == "bad":
        return ("{$N felt {sad|worried|upset}|$He was {sad|worried|upset}|$N {wanted to cry|did "
                "not know what to do|sighed}|"
                "A tear ran down $his {face|cheek}}.")
    return ("{$N {smiled|laughed|clapped|jumped for joy}|$He was {so happy|very glad|full of "
            "joy}|$N could not stop smiling|"
            "$N felt {proud|happy|warm inside}}.")


def lost(rng, n):
    spots = rng.sample(W.INDOOR_SPOTS if rng.random() < 0.5 else W.OUTDOOR_SPOTS, 4)
    n.update(s1=spots[0], s2=spots[1], s3=spots[2], s4=spots[3], finder=rng.choice(
        ["$N2", "$N3", "$N"]))
    helper = rng.choice(["2", "3"])
    h = lambda t: t.replace("#", helper)
    p2 = [
        "{One day|One morning|On $day|That afternoon}, $N could not find $his $toy.",
        "{It was gone|The $thing was gone|It was not where $he had left it}.",
        feeling("bad"),
        "$He looked $s1, but {the $thing was not there|it was not there|there was only "
        "{dust|an old shoe|a~ $color2 button}}.",
        "{Then $he looked $s2|$He looked $s2 too|$He even looked $s2}, but {found "
        "nothing|there was no $thing|it was not there either}."
    ]
    p3 = [
        h("{$N went to $N#|Just then, $N# came by|$N asked $N# for help}. \"{Have you seen my "
          "$thing|Did you see my $toy|Can you help me find my $thing}?\" $he asked."),
        h("\"{No, but I can help you look|Let us look together|Do not worry}\", said $N#. "
          "\"{When did you last {see|have} it|Where did you play with it last|Where were you "
          "this morning}?\"".replace('", said', ',\" said')),
        "$N {thought for a moment|thought hard|closed $his eyes and tried to remember}. \"{I "
        "had it when I was|I think I left it|Maybe it is} $s3!\" $he said.",
        "{They ran there at once|They went to look|Together they went to see}, {and there it "
        "was|and there was the $toy}, {right $s3|safe and sound|just waiting for $him}."
    ]
    if rng.random() < 0.35:
        p3[-1] = ("{They went to look|They looked there}, but the $thing was not there. "
                  "{Then|At last} they heard a small sound $s4. "
                  "{It was|There was} a~ $animal, and it was {sleeping on|playing with|sitting "
                  "next to} the $toy!")
        p3.append("{They both laughed|$N laughed}. \"{So you are the one who took it|You found "
                  "a good toy, little $animal}!\" said $N.")
    p4 = [
        feeling("good"),
        h("\"Thank you, $N#{|, for your help}!\" {said $N|$he said}."),
        "$He {put the $thing {in a safe place|on the shelf|in $his pocket}|held the $thing "
        "{close|tight}}."
    ]
    return [p2, p3, p4 + ending(rng, "lost")]


def fear(rng, n):
    what, short, moment, truth = rng.choice(W.FEARS)
    n.update(what=what, short=short, moment=moment, truth=truth)
    p2 = [
        "But $N {had one secret|had a problem}: $he was afraid of $what.",
        "{When $his friends {laughed and played|went ahead}, $N stayed behind|$He always "
        "{stayed away|made an excuse and went home}|$He never told anyone about it}.",
        "{One day|One evening}, $N2 {noticed|saw it} and asked, \"{What is wrong|Why are you "
        "hiding|Are you all right}, $N?\"",
        "\"I am afraid of $what,\" {said $N in a small voice|$N whispered|$he said quietly}."
    ]
    p3 = [
        "$N2 did not laugh. \"{I was afraid of {it|that} too|Everyone is afraid of "
        "something|That is all right},\" {said $N2|$he2 said}. \"{Take my hand|We can try "
        "together|Let us try one small step}.\"",
        "{So they|The next day, they} {tried together|went together}. $N $moment, and $his "
        "heart {beat fast|went thump, thump, thump}.",
        "{$He wanted to run away, but $N2 stayed close|$N2 counted to {three|five|ten} with "
        "$him|\"Breathe slowly,\" said $N2}.",
        "{After a while|Little by little|Slowly}, $N {understood|saw|found out} that $truth."
    ]
    p4 = [
        "\"{I did it|Look at me|It is not so bad}!\" {cried|called|said} $N.",
        feeling("good"),
        "$N2 {smiled|clapped}. \"{I knew you could do it|You were very brave},\" {said "
        "$N2|$he2 said}."
    ]
    return [p2, p3, p4 + ending(rng, "fear")]


def rescue(rng, n):
    trap, tool, act = rng.choice(
        [("stuck in a deep hole", "a long rope", "lowered the rope and pulled slowly"),
         ("caught in a thorn bush", "a pair of thick gloves", "pushed the thorns aside one by one"),
         ("sitting on a stone in the middle of the stream", "a long board",
          "put the board across the water"),
         ("high up in the $tree and could not get down", "a tall ladder",
          "climbed up and carried it down"),
         ("tangled in an old net", "a small knife", "cut the net very carefully"),
         ("shaking with cold in the snow", "a warm blanket", "wrapped the blanket all around it"),
         ("under a fallen branch", "a strong stick", "lifted the branch just high enough"),
         ("lost in the tall grass and calling for its mother", "a little bell",
          "rang the bell until the mother came")])
    n.update(trap=trap, tool=tool, act=act)
    p2 = [
        "{One day|One {rainy|windy|quiet} afternoon|On the way to $land}, $N heard a "
        "{small|soft|sad|strange} sound. {\"Help! Help!\"|It sounded like crying.|It came "
        "from somewhere near $land.}",
        "$He {followed the sound|looked around|ran to see what it was}. There was a~ "
        "{little|small|tiny|young} $animal, $trap.",
        "\"{Oh no|Poor little $animal|Do not be afraid}!\" said $N. \"I will help you.\""
    ]
    p3 = [
        "$N {tried to do it alone|tried and tried}, but $he was {too small|not strong "
        "enough|too short}.",
        "{So $he ran to|$He hurried to} {$N3|$N3, the $noun3}. \"{Please come quickly|I need "
        "your help}! A~ $animal is in trouble!\"",
        "$N3 {took|brought|found} $tool, and they {went back|hurried back} together.",
        "{Carefully|Very gently|Together}, they $act. {Soon|At last|A moment later}, the "
        "$animal was {free|safe}."
    ]
    p4 = [
        "The $animal {looked at $N with bright eyes|rubbed its head against $N|made a happy "
        "sound|was hungry, so $N gave it some $food}.",
        feeling("good"),
        "\"{You have a kind heart|You did the right thing|It was smart to ask for help},\" "
        "{said $N3|$N3 said}.",
        maybe(
            rng, 0.5, "{After that|From then on}, the $animal {came to visit|followed $N "
            "everywhere|waited near $land} every {day|morning}.")
    ]
    return [p2, p3, p4 + ending(rng, "help")]


def build(rng, n):
    what, stuff, fail, fix, done = rng.choice(W.PROJECTS)
    n.update(what=what, stuff=stuff, fail=fail, fix=fix, done=done, tool=what.split(" ", 1)[1])
    p2 = [
        "{One day|On $day|One sunny morning}, $N had an idea. \"{I want to|Let us|I am going "
        "to} {build|make} $what!\" $he said.",
        "\"{That sounds like fun|That is a great idea|Can I help}!\" said $N2{|, who had come "
        "to play}.",
        "{They gathered|First, they found|They looked everywhere for} $stuff. Then they "
        "{began|set to work|started to work}."
    ]
    p3 = [
        "{It was not easy|The work was hard|At first everything went well}. {Then|After an "
        "hour|In the afternoon}, $fail.",
        "{$N wanted to give up|\"It will never work,\" said $N|$N kicked a stone}. {$N2 shook "
        "$his2 head|But $N2 was not worried}. \"{Let us think|We only need a better plan|Let "
        "us ask $N3}.\"",
        "{They thought for a long time|They drew a plan on paper|They went to see $N3}. {In "
        "the end|Then|At last} they $fix.",
        "{This time it worked|Now it was just right|And it worked}!"
    ]
    p4 = [
        "$N and $N2 $done.",
        feeling("good"),
        "{\"We did it together,\" said $N2.|\"It is the best {tool} I have ever seen,\" said "
        "$N3.|Everyone came to look at the $tool.}".replace("{tool}", "$tool")
    ]
    return [p2, p3, p4 + ending(rng, "work")]


def share(rng, n):
    n.update(
        item=rng.choice(
            ["$toy", "big plate of $food", "basket of $food", "box of paints", "new swing"]), )
    n["item"] = expand(rng, n["item"], n)
    p2 = [
        "{One day|On $day|For $his birthday}, $N got a~ $item{| from $N3}.",
        "$N2 {came by and saw it|saw it and smiled}. \"{Can I {have|try} {some|it} too|May I "
        "join you|Will you share with me}?\" {asked $N2|$he2 asked}.",
        "\"No!\" said $N. \"It is {mine|all mine}.\" {$He turned away|$He held it tight|$He "
        "ran off with it}.", "$N2 {looked at the ground|said nothing|walked away slowly}."
    ]
    p3 = [
        "{$N sat alone under the $tree|$N went to $land alone|At home, $N sat alone}. But {it "
        "was not much fun|something did not feel right|$he could not enjoy it}.",
        "{$N3 sat down next to $him|$N3 saw $his face}. \"{What is the matter|Why are you so "
        "quiet}?\" {asked $N3|$he3 asked}.",
        "$N told {the whole story|$him3 everything}. \"{I was not kind|I did not share|I hurt "
        "my friend},\" {said $N|$he said}.",
        "\"{You can still make it right|It is not too late|A friend will understand},\" {said "
        "$N3|$N3 answered} {softly|with a smile|}."
    ]
    p4 = [
        "$N {ran|went} to find $N2. \"I am sorry,\" $he said. \"{Let us share|Please come and "
        "share it with me|Half of it is yours}.\"",
        "{$N2 smiled at once|$N2 was not angry anymore|$N2 gave $him a hug}. {They "
        "{played|laughed} together {until dark|all afternoon}|Together they had {so much "
        "fun|so much more fun}}."
    ]
    return [p2, p3, p4 + ending(rng, "share")]


def skill(rng, n):
    what, tool, fail, trick, done = rng.choice(W.SKILLS)
    n.update(what=what, tool=tool, fail=fail, trick=trick, done=done)
    p2 = [
        "$N {wanted to learn|wished $he could learn|had always wanted} to $what.",
        "{All $his friends could do it|$N2 could already do it|$He had seen $N3 do it}, and "
        "it looked so easy.",
        "{On the first day|The first time $he tried}, $N $fail. {The second time|On the "
        "second day}, $he $fail again."
    ]
    p3 = [
        "\"{I will never learn|It is too hard for me|I give up},\" said $N.",
        "$N3 {heard this and {smiled|sat down next to $him}|came and watched for a while}. "
        "\"{Nobody can do it the first time|I fell many times too|Every day you get a little "
        "better},\" {said $N3|$he3 said}.",
        "{$N3 showed $him a trick|Then $N3 gave $him some advice}. $N {listened|nodded} and "
        "$trick.",
        "$He practiced {every day|each morning|after school} for {a week|$n days|many days}."
    ]
    p4 = [
        "{Then one {day|morning}|At last}, {it happened|everything went right}. $N $done!",
        "\"{Look, look|I can do it|Did you see that}!\" {shouted|cried|called} $N.",
        feeling("good"),
        "$N3 {clapped|laughed and clapped}. \"{You did not give up|You worked hard for "
        "this},\" {said $N3|$he3 said}."
    ]
    return [p2, p3, p4 + ending(rng, "work")]


def storm(rng, n):
    n.update(evil=rng.choice(["storm", "heavy rain", "snow storm", "strong wind", "flood"]),
             gone=rng.choice(["roof", "door", "fence", "window", "bridge"]))
    p2 = [
        "{One night|One evening|In the middle of the night}, a $evil came over {$land|the "
        "hills|the whole valley}.",
        "{The sky turned {dark|black}|The wind howled|Everything shook}. $N {hid under $his "
        "blanket|listened to the noise|held $N2's hand}.",
        "{In the morning|When it was over}, $N {went outside|looked out}. {What a sight|Oh "
        "dear}! The $gone of {$N3's house|$N2's home} was {gone|broken}."
    ]
    p3 = [
        "\"{What shall we do now?|Where will I {sleep|live} now?|Everything is broken,}\" "
        "said {$N2|the poor neighbors}.",
        "\"{You can stay with me|We can fix it|Do not worry},\" said $N. \"{If everyone "
        "helps, it will not take long|Many hands make light work|I will ask everyone to "
        "come}.\"",
        "{Soon|By noon|Before long}, {all the neighbors came|everyone was there}. {Some|One "
        "group} brought {wood|tools|nails}, {some|others} {carried stones|held the "
        "ladder|swept the ground}, and $N3 {cooked $food for everyone|showed them what to do}.",
        "$N {carried|passed} the {nails|small pieces|hammer} and {sang|counted} {while they "
        "worked|all the time}."
    ]
    p4 = [
        "{By evening|Before the sun went down}, the new $gone was {ready|finished}. It was "
        "{even better than the old one|strong and straight}.",
        "\"Thank you, {everyone|all of you},\" said {$N2|$N3}. \"{I have the best neighbors "
        "in the world|I do not know what I would do without you}.\""
    ]
    return [p2, p3, p4 + ending(rng, "help")]


def race(rng, n):
    n.update(
        kind_of=rng.choice(
            ["running race", "boat race", "sled race", "swimming race", "wagon race"]),
        prize=rng.choice(["a golden cup", "a basket of $food", "a~ $color ribbon", "a big cake"]))
    n["prize"] = expand(rng, n["prize"], n)
    p2 = [
        "{Every year|Every $season}, there was a $kind_of {near $land|in the village|around "
        "the lake}. The prize was $prize.",
        "$N {wanted to win|had trained for $n weeks|was very excited}. {\"I will be the "
        "fastest,\" $he said.|But $N2 was {fast|strong} too.}",
        "\"{Ready, set, go|One, two, three, go}!\" {called|shouted} $N3."
    ]
    if rng.random() < 0.5:
        p3 = [
            "$N {was in front|took the lead} {right away|from the start}. {The wind was in "
            "$his face|Everyone cheered}.",
            "{Then|Suddenly|Halfway there}, $N heard a cry. $N2 had {fallen|hurt a foot|hit a "
            "stone}!",
            "$N {looked at the finish line|thought about the prize}. {Then $he stopped and "
            "turned around|But a friend was more important}.",
            "\"{Lean on me|Take my hand|We will finish together},\" said $N. {Slowly|Step by "
            "step}, they went {on|to the finish} side by side."
        ]
        p4 = [
            "They were the last ones to arrive, but {everyone cheered|the whole crowd stood "
            "up and clapped}.",
            "$N3 gave $prize to {both of them|the two friends}. \"{This is for the best "
            "friends|Winning is not only about being fast},\" {said $N3|$he3 said}."
        ]
    else:
        p3 = [
            "{The others were faster|$N2 ran ahead|At first $N was last}, but $N {did not "
            "give up|kept going|saved $his strength}.",
            "{One after another, they grew tired|The others stopped to rest|The others began "
            "to slow down}. $N {went on and on|passed one, and then another|never stopped}.",
            "{At the last turn|Near the end}, only $N2 was in front of $him. {They were side "
            "by side|Closer and closer $he came}."
        ]
        p4 = [
            "{With one last jump|By the tip of the nose}, $N {won|crossed the line first}! "
            "{\"Well done,\" said $N2. \"You earned it.\"|$N2 shook $his hand.}",
            "$N {got|was given} $prize, and {shared it with everyone|gave half of it to $N2}."
        ]
    return [p2, p3, p4 + ending(rng, "work")]


def gift(rng, n):
    n.update(made=rng.choice([
        "a~ $color scarf", "a necklace of shells", "a small wooden bird",
        "a card with dried $flower", "a song", "a picture of the whole family", "a soft pillow",
        "a~ $color mug", "a basket full of $flower"
    ]))
    n["made"] = expand(rng, n["made"], n)
    p2 = [
        "{Soon it would be|The next day was|On $day it was} $N2's birthday, {and|but} $N {had "
        "no gift|wanted to give something special}.",
        "$He {counted $his coins|looked into $his pocket}. There {was only one small "
        "coin|were only two coins|was nothing}. {That was not enough for anything in the "
        "shop|Everything in the shop cost too much}.",
        feeling("bad")
    ]
    p3 = [
        "\"{A gift does not need to cost money|The best gifts are made by hand|You can make "
        "something yourself},\" said $N3.",
        "$N thought about {what $N2 liked|this all night}. {Then|In the morning} $he had an "
        "idea. $He would {make|prepare} $made.",
        "$He {worked all {day|evening}|worked very quietly so that nobody would notice}. "
        "{Once $he had to start again|It was harder than $he thought}, but {at last it was "
        "ready|in the end it was beautiful}."
    ]
    p4 = [
        "{At the party|On the birthday}, $N2 opened {many gifts|the gifts one by one}. {The "
        "last one|Then came the one that} was from $N: $made.".replace(
            "{The last one|Then came the one that} was from $N", "The last one was from $N"),
        "$N2's eyes {grew wide|shone}. \"{You made this for me|Did you make it yourself}?\" "
        "{asked $N2|$he2 asked}. \"It is the best gift of all!\"",
        feeling("good")
    ]
    return [p2, p3, p4 + ending(rng)]


def truth(rng, n):
    n.update(
        item=rng.choice([
            "blue vase", "window", "clay pot", "old clock", "big mirror", "tea pot", "glass bowl",
            "green cup"
        ]), how=rng.choice([
            "playing ball in the house", "running too fast", "reaching for the cookies",
            "chasing a fly", "dancing around the room"
        ]))
    p2 = [
        "{One day|One afternoon|On $day}, $N was $how. {Crash|Bang}! {$N3's|The} $item {fell "
        "down and broke|broke into many pieces}.",
        "{Nobody had seen it|$N was all alone}. $He {hid the pieces|swept the pieces under "
        "the rug|put the pieces in a box}.",
        "{Soon|In the evening}, $N3 {came home|came in} and asked, \"{Where is the|What "
        "happened to the} $item?\"",
        "\"{I do not know|Maybe it was the wind|Maybe the cat did it},\" said $N. {$His ears "
        "felt hot|$His voice was very small|$He looked at the floor}."
    ]
    p3 = [
        "{At dinner|That night}, $N could not {eat|sleep}. {The secret felt heavy|$His "
        "stomach hurt|$He turned from one side to the other}.",
        "{At last|Finally}, $he {stood up|got out of bed} and went to $N3. \"{I must tell you "
        "something|It was me|I was not honest},\" $he said. \"I broke the $item. I am sorry.\"",
        "$N3 {was quiet for a moment|looked at $him for a long time}. Then $he3 {smiled|gave "
        "$N a hug}. \"{I can get a new $item|A $item is only a thing}, but {the truth is "
        "worth more|I am glad you told me}.\""
    ]
    p4 = [
        "{The next day|In the morning}, they {glued the pieces together|went to buy a new "
        "one|cleaned up together}.", "$N felt {light|much better}{ again|}."
    ]
    return [p2, p3, p4 + ending(rng, "truth")]


def mystery(rng, n):
    n.update(
        gone=rng.choice([
            "the $food", "the $food from the window", "one sock", "the milk", "$his $toy",
            "the $flower in the garden"
        ]), clue=rng.choice([
            "small wet footprints", "a trail of crumbs", "a soft grey feather",
            "tiny tracks in the mud", "some brown hair on the fence", "a thin line of sand"
        ]))
    n["gone"] = expand(rng, n["gone"], n)
    p2 = [
        "{Something strange happened|There was a mystery} in $town. Every {night|morning}, "
        "$gone {was gone|disappeared}.",
        "\"{Who could it be|Who would do such a thing|Where does it go}?\" {asked|said} $N3.",
        "\"I will find out,\" said $N. {$He loved a good mystery|$He took a lantern and a "
        "notebook|$He asked $N2 to come along}."
    ]
    p3 = [
        "{First|That evening}, they looked for clues. Near the door, $N found $clue. \"{Look "
        "at this|A clue}!\" $he whispered.",
        "They followed {it|the clue} {past the well|along the path|around the house} and "
        "{down to $land|under the fence|behind the barn}.",
        "{It was dark and quiet there|They walked on their toes}. {Then they heard a sound: "
        "munch, munch, munch|Something moved in the shadows}.",
        "$N held up the lantern. There sat a {little|tiny|thin} $animal with {its babies|big "
        "round eyes|a full mouth}."
    ]
    p4 = [
        "\"{So it was you|You are the thief}!\" said $N2. {The $animal was {hungry|cold}, "
        "that was all|The poor $animal looked scared}.",
        "\"{It only needs some help|It has no home},\" said $N. {They gave it {some $food|a "
        "warm place to sleep}|They made a small bed for it in the barn}.",
        "{After that|From then on}, nothing {was missing|disappeared} anymore, and {the "
        "mystery was solved|$N was called the best detective in the village}."
    ]
    return [p2, p3, p4 + (ending(rng) if rng.random() < 0.7 else [])]


def garden(rng, n):
    n.update(
        seed=rng.choice(["a tiny seed", "$n small seeds", "a bag of seeds", "one big seed"]),
        plant=rng.choice([
            "pumpkin", "sunflower", "tomato plant", "bean plant", "apple tree", "rose bush", "melon"
        ]))
    n["seed"] = expand(rng, n["seed"], n)
    p2 = [
        "{One day|In spring|One morning}, $N3 gave $N $seed. \"{Plant this and be patient|Put "
        "it in the ground and give it water},\" {said $N3|$he3 said}.",
        "$N {dug a hole|found a sunny place} {near the fence|beside $his home|behind the "
        "house}. {$He covered the hole with soft earth|$He pushed the soil down with both "
        "hands} and {gave it water|poured some water on it}.",
        "{The next day|The next morning}, $he {ran out to look|went to look}. {Nothing had "
        "happened|There was nothing to see}. {The day after, there was still nothing|For a "
        "whole week, there was nothing}."
    ]
    p3 = [
        rng.choice([
            "\"{Why does it not grow|Is it broken}?\" asked $N. $N3 {laughed|smiled}. "
            "\"It is growing where you cannot see it,\" {said $N3|$he3 said}.",
            "Then it did not rain for many days. The ground was {dry|hard}. $N "
            "carried water from $land {every evening|every day}, {one small bucket at "
            "a time|even when $he was tired}.",
            "One day, hungry birds came to {eat the seeds|pick at the ground}. $N "
            "{made a scarecrow|ran out and waved $his arms}, and {they flew away|the "
            "birds left}."
        ]), "{Then|At last|One warm morning}, a small green {leaf|shoot} {came out of|pushed "
        "through} the soil. \"{It is alive|It is growing}!\" {cried|shouted} $N.",
        "{It grew and grew|Week after week it grew}. {First it was as tall as $his knee, then "
        "as tall as $N|It grew leaves, and then it grew flowers}."
    ]
    p4 = [
        "{By the end of summer|In autumn}, there was {a huge|a beautiful|the biggest} $plant "
        "{in the whole village|that anyone had ever seen|in the garden}.",
        "$N {shared it with {$N2|everyone}|showed it to $N2}. \"{How did you do it|What is "
        "your secret}?\" asked $N2. \"{Water, sun, and time|I waited and took care of it},\" "
        "said $N."
    ]
    return [p2, p3, p4 + ending(rng, "work")]


def newfriend(rng, n):
    n.update(place=rng.choice(["school", "the park", "the playground", "the village", "the pond"]))
    p2 = [
        "{One day|On $day}, someone new came to $place. {It was $kind2|There was $kind2} "
        "named $N2.",
        "$N2 was {very quiet|shy} and {sat alone|did not talk to anyone}. {The others played "
        "without $him2|Nobody knew what to say}.",
        "$N {remembered {$his own first day|how it felt to be alone}|looked at $N2 and "
        "thought about it}."
    ]
    p3 = [
        "$He {walked over|went over} {slowly|with a smile}. \"{Hello|Hi}, I am $N,\" $he "
        "said. \"{Do you want to play|Do you like $food|Would you like to see something}?\"",
        "$N2 {looked up|nodded shyly}. \"{Yes, please|I would like that|I do not know any "
        "games here},\" {said $N2|$he2 whispered}.",
        "$N {showed $him2 {the best hiding place|the swing|$land}|shared $his $food|took out "
        "$his $toy}. {Soon they were both laughing|After a while, $N2 began to talk and "
        "laugh}.",
        "{It turned out that|$N found out that} $N2 {could {whistle|draw|run|sing} better "
        "than anyone|knew many {stories|games|songs}|also liked {$food|$flower|the rain}}."
    ]
    p4 = [
        "{The next day|After that}, {everyone wanted to play with $N2|they {met|played} "
        "again}. {But $N2 always kept a place for $N|\"Thank you for saying hello,\" said "
        "$N2}."
    ]
    return [p2, p3, p4 + ending(rng)]


def journey(rng, n):
    n.update(
        cure=rng.choice([
            "a~ $color flower", "a bottle of fresh water from the spring", "some honey",
            "a special herb", "a warm coat", "a~ $color stone"
        ]), far=rng.choice([
            "on top of the mountain", "on the other side of the forest", "across the river",
            "at the end of the valley", "on a small island"
        ]), way=rng.choice([
            "The way was long and steep.", "The path was narrow.",
            "It was far away, and the days were short."
        ]))
    n["cure"] = expand(rng, n["cure"], n)
    p2 = [
        "{One day|One $season}, $N3 {became ill|was sick and stayed in bed}. \"{Only one "
        "thing can help|I need one thing to get better},\" {said the doctor|$he3 said}. \"It "
        "is $cure, and it is found $far.\"",
        "\"I will go,\" said $N. {\"You are small,\" said $N2, \"but you are $trait.\"|$N2 "
        "wanted to come along.} {$He packed some $food|$He put $food and water in a bag} and "
        "{set off|left at sunrise}.", n["way"]
    ]
    trials = rng.sample([
        "{First|On the way}, there was a wide stream. $N {jumped from stone to stone|made a "
        "bridge from a fallen tree}, and {did not even get wet|reached the other side}.",
        "In the forest, $he {lost $his way|could not see the path}. {An old owl|A friendly "
        "bird} {showed $him where to go|told $him to follow the stream}.",
        "{At night|When it got dark}, it was cold. $N {slept under a~ $tree|made a bed of "
        "leaves} and {looked at the stars|thought of home}.",
        "{Then|Next}, $he met a {hungry|tired} $animal. {$N gave it half of $his food|$He "
        "shared $his last piece of bread with it}. \"Thank you,\" said the $animal. \"{I will "
        "show you a shorter way|I know where to find what you need}.\"",
        "{A big rock|A fallen tree} {blocked the path|lay on the path}. $N {pushed, but it did "
        "not move|could not go over it}. So $he {dug a way under it|went around it}.",
    ], rng.choice([2, 3]))
    p4 = [
        "{At last|After $n days}, $N {arrived|reached the place}. {There it was|And there $he "
        "found it}: $cure. {$He took it carefully|$He put it in the bag}.",
        "{The way home was easier|$N ran almost all the way home}. {The next morning|Soon}, "
        "$N3 {felt better|could sit up and smile}.",
        "\"{You went so far for me|You are {braver|stronger} than you look},\" said $N3."
    ]
    return [p2, trials, p4 + ending(rng)]


def wish(rng, n):
    bad, worse = rng.choice(
        [("all the $food in the world", "there was so much $food that $he could not open the door"),
         ("to be as tall as a tree", "$he could not fit into $his own home"),
         ("that it would never be night again", "nobody could sleep, and everyone was tired"),
         ("that everything would turn to gold", "the bread was gold, and the water was gold, and "
          "$he was hungry"),
         ("to fly like a bird", "$he flew so high that $he could not come down"),
         ("that it would always be winter", "the flowers did not grow and the birds were cold"),
         ("to be invisible", "nobody could see $him, and nobody would play with $him"),
         ("that it would rain cookies", "the cookies broke the windows and covered the road")])
    n.update(bad=expand(rng, bad, n), worse=expand(rng, worse, n))
    p2 = [
        "{One day|One evening}, $N found {an old|a dusty|a strange} "
        "{lamp|bottle|shell|ring|box} {near $land|in the sand|in the attic}. {$He cleaned "
        "it|$He rubbed it with $his sleeve}, and {a small voice spoke|a tiny light came out}.",
        "\"{I will give you one wish|You may make a wish},\" said the {voice|light}. \"{But "
        "think well|Be careful what you ask for}.\"",
        "$N did not think {for long|at all}. \"I wish $bad,\" $he said."
    ]
    p3 = [
        "{At once|In a moment}, the wish came true. {At first it was wonderful|At first $N "
        "was very happy}.", "But {soon|after a day} there was a problem: $worse.",
        feeling("bad"),
        "\"{I was foolish|I did not think},\" said $N. \"{Please make everything as it was "
        "before|I wish that everything was normal again}.\""
    ]
    p4 = [
        "\"{You have learned something|Now you know},\" said the {voice|light}, and {with a "
        "soft sound|in a flash} everything was as before.",
        "$N {looked around|took a deep breath}. {The old world was just right|$He was happy "
        "with what $he had}."
    ]
    return [p2, p3, p4 + ending(rng)]


def trade(rng, n):
    n["thing"] = rng.choice(["kite", "ball", "drum", "doll", "wagon", "flute", "whistle"])
    n["toy"] = rng.choice(W.COLORS) + " " + n["thing"]
    chain = rng.sample([
        "a spoon", "a hat", "a bag of nuts", "a rope", "a bell", "a chicken", "a warm coat",
        "a book", "a lantern", "a pair of shoes"
    ], 3)
    people = rng.sample(W.ELDERS, 3)
    n.update(a=chain[0], b=chain[1], c=chain[2], x=people[0][0], y=people[1][0], z=people[2][0],
             an=chain[0].split()[-1], bn=chain[1].split()[-1], cn=chain[2].split()[-1])
    p2 = [
        "$N wanted a~ $toy, but $he had no money. All $he had was $a.",
        "{On the road|On $day}, $he met $x. \"{I need that|What a nice $an|I could use "
        "that},\" said $x. \"Will you trade it for $b?\" $N {said yes|agreed}."
    ]
    p3 = [
        "{A little later|Then}, $he met $y, who {looked sad|was looking for something}. \"{I "
        "have lost my $bn|If only I had $b},\" said $y. $N gave $y the $bn, and $y gave $him "
        "$c.", "{At the market|Near $land}, $z saw the $cn. \"{That is just what I need|I have "
        "looked for that everywhere}!\" said $z. \"{What do you want for it|Is it for sale}?\"",
        "$N {looked at the table|pointed}. There was a~ $toy. \"{That one, please|I would "
        "like that $thing},\" $he said."
    ]
    p4 = [
        "{So|And so}, $N {went home with|got} the $toy, {and everyone had what they "
        "needed|and everyone was happy}."
    ]
    return [p2, p3, p4 + ending(rng)]


def cooking(rng, n):
    a, b = rng.sample(["flour", "sugar", "salt", "butter", "milk", "eggs", "apples", "honey"], 2)
    n.update(
        a=a, b=b, dish=rng.choice([
            "a cake", "a pot of soup", "an apple pie", "a batch of cookies",
            "pancakes for everyone", "a big loaf of bread"
        ]))
    p2 = [
        "{One day|On $day}, $N and $N2 wanted to {make|bake|cook} $dish{ for $N3|}.".replace(
            "{make|bake|cook}", "make"),
        "{They washed their hands|They put on aprons} and {took out a big bowl|read the "
        "recipe}. \"{First we need $a, and then $b|We need $a and $b},\" said $N.",
        "But {the jar was empty|when they looked, there was a problem}. \"We have no $a!\" "
        "said $N2."
    ]
    p3 = [
        "{$N ran to $N3's house|They went next door to $N3}. \"{May we borrow some $a|Do you "
        "have any $a}?\" $he asked. \"{Of course|Yes, take as much as you need},\" said $N3. "
        "\"{But bring me a piece later|What are you making}?\"",
        "{Back in the kitchen|When they came home}, they mixed {everything|the $a and the "
        "$b}. {$N2 dropped some on the floor, and they laughed|There was flour on the table, "
        "on the floor, and on $N's nose}.",
        "{They waited and waited|They put it on the stove|They put it in the oven}. "
        "{Soon|After half an hour}, the whole house smelled {wonderful|warm and sweet}."
    ]
    p4 = [
        "{At last it was ready|It was done}. They {gave the first piece to $N3|took some to "
        "$N3}. \"{It is delicious|This is the best I have ever tasted},\" said $N3.",
        "{There was enough for everyone|They ate until nothing was left}."
    ]
    return [p2, p3, p4 + ending(rng, "share")]


def astray(rng, n):
    n.update(sign=rng.choice([
        "the north star", "the sound of the river", "the smoke from the chimneys",
        "the bell of the village", "$his own footprints", "the light of the lighthouse"
    ]))
    n["sign"] = expand(rng, n["sign"], n)
    p2 = [
        "{One day|One afternoon}, $N {went into the forest to pick "
        "{berries|mushrooms|$flower}|followed a~ $color butterfly|walked farther than ever "
        "before}.",
        "{$He did not look at the path|$He went deeper and deeper}. {When $he looked up|After "
        "some time}, everything {looked the same|was strange}. $N was lost.",
        "{\"Hello! Is anyone there?\" $he called. Nobody answered.|The trees were tall, and "
        "{it was getting dark|the shadows were long}.}"
    ]
    p3 = [
        "{$N sat down on a stone|$He took a deep breath}. \"{I must stay calm|Do not run, "
        "think},\" $he told $himself. {$He remembered what $N3 had said|Then $he remembered "
        "something}: \"{When you are lost|If you lose your way}, {look and listen|stay calm "
        "and look for a sign}.\"",
        "{So $N listened|$N looked around very carefully}. {And then|At last} $he noticed "
        "$sign. \"{That is the way home|Now I know where to go}!\" $he said.",
        "{Step by step|Slowly}, $he followed it{, over the hill and past the old mill|, "
        "through the trees and across the field|}."
    ]
    p4 = [
        "{Soon|At last}, $he saw the lights of {home|the village}. $N2 {ran to meet $him|was "
        "waiting at the gate}. \"{We were so worried!|Where have you been?}\" {said $N2|$he2 "
        "said}.", "\"I {lost my way|was lost}, but I found it again,\" said $N."
    ]
    return [p2, p3, p4 + ending(rng)]


def trick(rng, n):
    n.update(good=rng.choice(
        ["a big piece of cheese", "a basket of $food", "a pot of honey", "the last $food"]))
    n["good"] = expand(rng, n["good"], n)
    p2 = [
        "{One day|One morning}, $N had $good. {A sly|A hungry} {fox|wolf|crow|cat} saw it and "
        "{wanted it|made a plan}.",
        "\"{Good morning|Hello, my friend},\" it said. \"{What a lovely voice you have. Will "
        "you sing for me|You look so strong. Can you lift that stone with both hands|I hear "
        "there is a much bigger one at the bottom of the well}?\""
    ]
    p3 = [
        "$N {almost {did it|believed it}|thought for a moment}. {But then $he remembered the "
        "words of $N3|But something was wrong}: \"{Be careful when a stranger is too "
        "sweet|Think before you act}.\"",
        "\"{Of course|What a good idea},\" said $N. \"But first {you must close your eyes and "
        "count to twenty|turn around so that I am not shy|go and call the others, so that "
        "they can hear it too}.\"",
        "{The thief did so|It did what $N said}, and $N {ran home with the food|climbed up "
        "the $tree with the food|locked the door from inside}."
    ]
    p4 = [
        "{When it turned around, $N was gone|When it came back, nobody was there}. \"{I have "
        "been tricked|$N is too clever for me}!\" it said{, and went away hungry|}.",
        "$N {shared the food with $N2|told $N2 about it}, and they {laughed for a long "
        "time|laughed until their stomachs hurt}."
    ]
    return [p2, p3, p4 + (ending(rng) if rng.random() < 0.6 else [])]


def sea(rng, n):
    n.update(trouble=rng.choice(
        ["thick fog", "a sudden storm", "a strong current", "a dark night without stars"]))
    p2 = [
        "$N3 had a small boat {with a~ $color sail|called the $flower}. {One day|One "
        "morning}, $N was allowed to come along.".replace("called the $flower",
                                                          "with a~ $color2 flag"),
        "{The sea was calm|The water was smooth and blue}. They {caught $n fish|saw a whale "
        "far away|ate $food on the deck}.",
        "But {in the afternoon|on the way back}, there was $trouble. {They could not see the "
        "shore|\"Hold on tight!\" called $N3}."
    ]
    p3 = [
        "{$N was scared|$His heart beat fast}, but $he {did what $N3 said|stayed calm}. {$He "
        "rang the bell again and again|$He held the lamp up high|$He watched for a light}.",
        "{At last|After a long time}, there was {a light|an answer}. {It was the "
        "lighthouse|$N2 stood on the shore with a lantern}! \"{This way|Over there}!\" "
        "{cried|shouted} $N.",
        "{Slowly|Carefully}, $N3 turned the boat. {The waves carried them in|They came closer "
        "and closer to the harbor}."
    ]
    p4 = [
        "{On land again|Back on the shore}, {everyone hugged them|they drank hot tea}. \"{You "
        "were a good sailor today|I could not have done it without you},\" said $N3."
    ]
    return [p2, p3, p4 + ending(rng)]


def robot(rng, n):
    n.update(
        bot=rng.choice(["Bolt", "Tick", "Dibo", "Gear", "Zip", "Tinny"]), job=rng.choice([
            "clean the floor", "carry boxes", "water the plants", "sort the books",
            "wash the dishes"
        ]), odd=rng.choice([
            "watered the shoes", "put the books in the oven", "painted the cat $color",
            "swept the flowers away", "made soup with soap"
        ]))
    n["odd"] = expand(rng, n["odd"], n)
    p2 = [
        "{One day|On $day}, {$N3|Uncle Bob} {built|brought home} a {small|little|round} "
        "robot. Its name was $bot{, and it had two $color lights for eyes|}.",
        "$bot {was made to|could} $job. But {on the first day|at first} it $odd! {$N "
        "laughed|Everyone was surprised}.",
        "\"{I am sorry|I do not understand},\" said the robot. \"{I am new here|Please teach "
        "me}.\""
    ]
    p3 = [
        "So $N {became its teacher|taught it every day}. \"{This is a cup|This is a flower}, "
        "and {this is a shoe|that is a book},\" $he said. $bot {listened and blinked|wrote "
        "everything down in its memory}.",
        "{After a week|Little by little}, $bot {made fewer mistakes|learned to do it right}. "
        "{But there was something it did not understand|One evening it asked a question}. "
        "\"What is a friend?\" asked $bot.",
        "$N {thought about it|smiled}. \"{A friend is someone who helps you and does not "
        "laugh at your mistakes|A friend stays with you, even on bad days},\" {said $N|$he "
        "said}."
    ]
    p4 = [
        "$bot was {silent|quiet} for a moment, and its lights {shone|glowed} "
        "{brightly|softly}. \"Then you are my friend,\" it said.",
        feeling("good")
    ]
    return [p2, p3, p4 + ending(rng)]


def show(rng, n):
    n.update(part=rng.choice([
        "sing a song", "say a long poem", "play the king", "play the drum", "dance the first dance",
        "be the tree in the play"
    ]))
    p2 = [
        "{There was going to be a show|$N3 planned a play} {at school|in the village hall|in "
        "the big barn}. $N {was chosen to|had to|would} $part.",
        "$He practiced {in front of the mirror|every evening|with $N2}. {Everything went "
        "well|At home it was easy}.",
        "But {on the big day|when the curtain opened}, $N saw {so many faces|the big crowd}. "
        "{$His mouth was dry|$His knees shook|$He forgot everything}."
    ]
    p3 = [
        "{It was very quiet|Somebody coughed}. {Then|In the first row}, $N2 {began to {hum "
        "softly|clap slowly}|smiled and waved}.",
        "$N {looked only at $N2|took a deep breath}. {The words came back|$He opened $his "
        "mouth and began}, first {softly|quietly}, then {louder|stronger}.",
        "{Before $he knew it, it was over|When it was over, there was silence}. {Then "
        "everyone clapped|Then came the applause, loud as rain}."
    ]
    p4 = [
        "\"{You were wonderful|That was the best part of the show},\" said $N3. \"{I looked "
        "at my friend, and then I was not afraid|I could do it because $N2 was there},\" said "
        "$N."
    ]
    return [p2, p3, p4 + ending(rng, "fear")]


def stuck_kite(rng, n):
    n.update(th=rng.choice(["kite", "balloon", "ball", "hat", "paper plane"]), col=rng.choice(
        W.COLORS))
    tries = rng.sample([
        "$N {jumped|jumped as high as $he could}, but {the branch was too "
        "high|could not reach it}.", "$N2 threw a {stick|shoe}, but {it got stuck too|it missed}.",
        "They shook the tree, but only {leaves|a few apples|some snow} fell down.",
        "$N stood on $N2's shoulders, but they {fell into the grass|both fell "
        "over}.", "They {asked the wind to blow|waited for the wind}, but {nothing "
        "moved|the air was still}."
    ], 2)
    p2 = [
        "{One windy day|On $day}, $N and $N2 played with a~ $col $th {near $land|in the park}.",
        "{Suddenly|Then}, {a strong wind|the wind} took it {up, up, up|away}. It {landed|got "
        "stuck} {high|} in the $tree.", "\"Oh no!\" {cried|said} $N. \"How will we get it back?\""
    ]
    p3 = tries + [
        "{Then $N had an idea|$N2 thought about it}. \"{Let us ask {the crow|a "
        "bird|the squirrel}|We can ask $N3 for the long ladder|We can use the long "
        "pole from the garden}!\"",
        "{It was a good idea|They did just that}. {A moment later|Soon}, the $th "
        "{came down|was free}."
    ]
    p4 = [
        feeling("good"), "\"{Next time we will play in the open field|Let us be more careful "
        "now},\" said $N2. {They {played|laughed} until sunset|And that is "
        "what they did}."
    ]
    return [p2, p3, p4 + ending(rng)]


def night(rng, n):
    n.update(q=rng.choice([
        "Why does the moon follow us", "Why do the stars shine", "Where does the sun go at night",
        "Why is the night dark"
    ]))
    ans = {
        "Why does the moon follow us": "The moon is so far away that it seems to stay in the "
        "same place while we walk",
        "Why do the stars shine": "Every star is a sun, very hot and very far away",
        "Where does the sun go at night": "The earth turns, and when it is night here, the "
        "sun shines on the other side",
        "Why is the night dark": "Our side of the earth has turned away from the sun"
    }
    n["ans"] = ans[n["q"]]
    p2 = [
        "{One night|One clear evening}, $N could not sleep. {$He went to the window|$He went "
        "outside} and looked at the sky.",
        "{The moon was round and bright|There were more stars than $he could count}. "
        "{Everything was silver and still|A soft wind moved the leaves}.",
        "$N3 {came and stood next to $him|sat on the bench outside}. \"{Can you not sleep|Are "
        "you still awake}?\" {asked $N3|$he3 asked}."
    ]
    p3 = [
        "\"{I have a question|I was just wondering},\" said $N. \"$q?\"",
        "\"{That is a good question|I asked the same thing when I was small},\" said $N3. "
        "\"$ans.\"",
        "$N {thought about it for a while|looked up again}. \"{The world is {big|full of "
        "wonders}|I want to know everything about the sky},\" $he said.",
        "\"{Then keep asking questions|Every answer begins with a question},\" said $N3{, and "
        "put a blanket around $him|}."
    ]
    p4 = [
        "{They watched the sky together|They counted stars} until $N's eyes {closed|grew "
        "heavy}. {$N3 carried $him to bed|Soon $he was asleep and dreamed of flying among the "
        "stars}."
    ]
    return [p2, p3, p4]


def snow(rng, n):
    n.update(nose=rng.choice(["a carrot", "a small stone", "a pine cone"]))
    p2 = [
        "{In the night|While everyone slept}, snow had covered {the whole "
        "village|$land|everything}. $N {put on $his boots|ran outside} and called $N2.",
        "\"Let us make a snowman!\" said $N. {They rolled a big ball, then a smaller one, and "
        "then the smallest|They rolled and pushed until they were warm}.",
        "{For the nose, they took|They gave it} $nose, and {for the eyes two black stones|a~ "
        "$color hat on its head}."
    ]
    p3 = [
        "{In the evening|That night}, $N looked out of the window. {The snowman looked "
        "lonely|It was very cold outside}. \"{It needs a friend,|Is it not sad out there?}\" "
        "said $N.",
        "{The next morning|In the morning}, they made {a second snowman|a small snow dog} "
        "next to it. {They gave it a~ $color2 scarf|Now there were two}.",
        "{But then the days grew warmer|A week later, the sun came out}. {Drip, drip, "
        "drip|Every day the snowman was a little smaller}. $N was sad."
    ]
    p4 = [
        "\"{Do not be sad|It is not really gone},\" said $N3. \"{The water goes into the "
        "ground and helps the $flower grow|Next winter it will come back}.\"",
        "{In spring|And when spring came}, {the first $flower grew|there were $flower} in "
        "that very place. {$N smiled|\"Hello, old friend,\" said $N}."
    ]
    return [p2, p3, p4]


def pet(rng, n):
    n.update(
        petname=rng.choice(
            ["Button", "Socks", "Biscuit", "Shadow", "Star", "Cookie", "Lucky", "Muffin"]),
        p=rng.choice(["kitten", "puppy", "rabbit", "duckling", "turtle", "parrot"]))
    p2 = [
        "{More than anything|For a long time}, $N wanted a pet. {One day|On $his birthday}, "
        "$N3 {brought a box|came with a basket}. {Something moved inside|There was a small "
        "sound inside}.",
        "It was a~ {little|tiny|soft} $color $p! \"{I will call you|Your name is} $petname,\" "
        "said $N.",
        "\"{A pet is not a toy|You must take good care of it},\" said $N3. \"{It needs food, "
        "water, and love every day|It needs you every day, even when you are tired}.\""
    ]
    p3 = [
        "{At first|In the first days}, $petname was {shy and hid under the bed|wild and "
        "chewed on everything}. $N {sat very still and waited|was patient}. {Then|One "
        "evening}, $petname {came out and {sniffed|touched} $his hand|fell asleep on $his "
        "knees}.",
        rng.choice([
            "{One day|Then one morning}, the {gate|door} was open, and $petname was "
            "gone! $N {looked everywhere|called and called}. {$N2 helped to look|The "
            "whole street helped}. In the evening, there was a scratch at the door. "
            "{$petname had come home|It was $petname, wet and tired, but safe}.",
            "{Every morning|Every day}, $N {fed|brushed} $petname and {gave it fresh "
            "water|cleaned its bed}. {Sometimes $he wanted to play first, but $he did "
            "not forget|It was a lot of work, but $he liked it}.",
            "$N tried to teach $petname a trick. {It took $n weeks|It was not easy}. "
            "{But then $petname could {roll over|jump through a ring|give a paw}|At "
            "last, it worked}, and {$N2 clapped|everyone was amazed}."
        ])
    ]
    p4 = [
        "$N {gave $petname a big hug|held $petname close}. \"{You are my best friend|I will "
        "always take care of you},\" $he said."
    ]
    return [p2, p3, p4 + ending(rng)]


def quarrel(rng, n):
    n.update(over=rng.choice([
        "who was faster", "which game to play", "who found the $thing first", "whose idea it was",
        "the last piece of $food"
    ]))
    n["over"] = expand(rng, n["over"], n)
    p2 = [
        "{One day|On $day}, $N and $N2 had a {quarrel|big fight}. It was about $over.",
        "\"{I am right|You are wrong|It is not fair}!\" said $N. \"No, {I am|you are}!\" "
        "shouted $N2.".replace("\"No, {I am|you are}!\"", "\"No, you never listen!\""),
        "{They turned their backs and went home|They did not speak for $n days}. {The house "
        "was quiet|It was a long, grey afternoon}."
    ]
    p3 = [
        "$N {sat by the window|looked at $his $toy}. {It was no fun to play alone|There was "
        "nobody to laugh with}. {\"It was such a small thing,\" $he thought|$He could not "
        "even remember how it began}.",
        "{At the same time|In the other house}, $N2 {felt the same|was thinking the same "
        "thing}. {So they both went out|They both opened the door}, and they met {halfway|in "
        "the middle of the road}.",
        "\"I am sorry,\" they said at the same time. {Then they both laughed|They looked at "
        "each other and began to laugh}."
    ]
    p4 = [
        "\"{Let us never fight again|Next time, let us talk first},\" said $N2. \"{And if we "
        "do, let us make up quickly|Agreed},\" said $N."
    ]
    return [p2, p3, p4 + ending(rng, "share")]


PLOTS = {
    "a lost thing": lost, "being afraid": fear, "helping an animal": rescue,
    "building something": build, "sharing": share, "learning something new": skill,
    "a storm": storm, "a race": race, "a birthday gift": gift, "telling the truth": truth,
    "a mystery": mystery, "a garden": garden, "a new friend": newfriend, "a long journey": journey,
    "a wish": wish, "trading things": trade, "cooking": cooking, "getting lost": astray,
    "a clever trick": trick, "the sea": sea, "a robot": robot, "a show": show,
    "a windy day": stuck_kite, "the night sky": night, "winter and snow": snow, "a pet": pet,
    "a quarrel": quarrel,
}


def join(rng, names, paragraphs, breaks=None):
    """Expand and join; a story is either one block or paragraphs."""
    if breaks is None:
        breaks = rng.random() < 0.5
    out = []
    for p in paragraphs:
        sentences = [expand(rng, t, names) for t in p if t]
        out.append(" ".join(s for s in sentences if s))
    return ("\n\n" if breaks else " ").join(p for p in out if p)


def story(rng, topic=None, hero=None, names=None):
    """-> (text, topic, names)"""
    topic = topic or rng.choice(list(PLOTS))
    names = names or cast(rng, hero=hero)
    if topic in ("a robot", "a show") and names["noun"] not in ("boy", "girl") and hero is None:
        names = cast(rng, beasts=0.0)
    body = PLOTS[topic](rng, names)
    return join(rng, names, [opening(rng)] + body), topic, names
