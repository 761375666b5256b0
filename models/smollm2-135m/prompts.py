"""Prompts for training and measuring: hand-written request templates, filled with topics.

Topics are split, so that held-out prompts ask about things the drafter was never trained on.
"""

from itertools import product

TEMPLATES = {
    "explain": [
        "Explain {} in simple terms.",
        "What is {}?",
        "How does {} work?",
        "Why is {} important?",
        "What should a beginner know about {}?",
        "Describe {} to a ten-year-old.",
        "Give a short introduction to {}.",
        "What are common misunderstandings about {}?",
        "Summarize what is known about {} in one paragraph.",
        "Tell me about the history of {}.",
    ],
    "list": [
        "List five facts about {}.",
        "Give me ten ideas related to {}.",
        "What are the main advantages and disadvantages of {}?",
        "List the steps to get started with {}.",
        "Give five tips about {}.",
        "What questions should I ask an expert on {}?",
        "Name three books someone interested in {} might enjoy, and say why.",
        "Make a checklist for a day about {}.",
    ],
    "write": [
        "Write a short story about {}.",
        "Write a poem about {}.",
        "Write an email to a friend about {}.",
        "Write a product description that mentions {}.",
        "Write a dialogue between two people who disagree about {}.",
        "Write a blog post introduction about {}.",
        "Write a news report about {}.",
        "Write a speech about {} for a school event.",
    ],
    "advice": [
        "I want to learn more about {}. Where do I start?",
        "My friend is worried about {}. What can I say to help?",
        "How can I save money on {}?",
        "Compare {} with an alternative of your choice.",
        "Is {} good for children? Give reasons.",
        "Plan a weekend around {}.",
        "What could go wrong with {}, and how can I prevent it?",
    ],
    "code": [
        "Write a Python function that stores information about {} in a dictionary.",
        "Write a Python class that models {}.",
        "Write a small HTML page about {}.",
        "Write an SQL table for records about {} and a query that counts them.",
        "Write a Python program that prints a quiz about {}.",
    ],
    "math": [
        "Make up a word problem about {} with two numbers, and solve it step by step.",
        "If I spend 12 dollars a week on {}, how much do I spend in a year? Show your work.",
        "A class of 24 students votes on {}. One third votes yes. How many vote no?",
        "Explain percentages with an example about {}.",
    ],
}

TOPICS = """
photosynthesis; the water cycle; black holes; vaccines; inflation; democracy; the French Revolution;
recycling; solar power; wind turbines; electric cars; bicycles; coffee; tea; chocolate; bread
baking; vegetable gardening; house plants; bees; whales; dolphins; wolves; elephants; cats; dogs;
horses; birds of prey; butterflies; dinosaurs; volcanoes; earthquakes; hurricanes; rainbows; the
moon; Mars; satellites; telescopes; microscopes; magnets; electricity; batteries; computers; the
internet; email; passwords; online privacy; social media; video games; chess; football; basketball;
tennis; swimming; running a marathon; yoga; meditation; better sleep; healthy breakfasts; drinking
water; vitamins; first aid; the human heart; the brain; memory; dreams; emotions; friendship;
teamwork; public speaking; job interviews; time management; budgeting; saving money; investing;
taxes; starting a business; marketing; customer service; remote work; learning a language; reading
books; writing poetry; painting; photography; music theory; playing the piano; playing the guitar;
dancing; theater; movies; museums; architecture; bridges; trains; airplanes; ships; traveling alone;
camping; hiking; maps; the Amazon rainforest; the Sahara desert; Antarctica; the Pacific Ocean;
coral reefs; rivers; mountains; forests; climate change; air pollution; plastic waste; clean water;
farming; cooking pasta; making soup; spices; cheese; apples; bananas; potatoes; rice; corn; sugar;
salt; fermentation; nutrition; allergies; the common cold; hand washing; teeth; eyesight; hearing;
bones; muscles; genetics; evolution; cells; bacteria; viruses; atoms; chemical reactions; gravity;
light; sound; heat; algebra; geometry; probability; statistics; prime numbers; fractions; logic;
programming in Python; databases; algorithms; artificial intelligence; machine learning; robots; 3D
printing; space travel; ancient Egypt; ancient Rome; ancient Greece; the Middle Ages; the
Renaissance; the Industrial Revolution; World War II; the Cold War; human rights; voting; courts of
law; newspapers; radio; television; advertising; fashion; shoes; furniture; home repair; painting a
room; cleaning a kitchen; moving to a new city; birthday parties; weddings; holidays; gift giving;
pets for families; school homework; university life; teachers; libraries; volunteering; charity;
kindness; honesty; courage; patience; happiness; stress; habits; goals; creativity; curiosity;
storytelling; jokes; riddles; puzzles; origami; knitting; sewing; woodworking; pottery; jewelry;
gardens; lakes; snow; autumn leaves; spring flowers; summer heat; winter clothing
"""

HELD_OUT_TOPICS = """
tides; penguins; glaciers; origins of writing; paper airplanes; lemonade stands; night markets;
lighthouses; kites; honey; compost; public transport; sign language; astronomy clubs; mushrooms;
tsunamis; insurance; sleepwalking; barbers; maple syrup
"""


def split_topics(text: str) -> list[str]:
    """The topics of a semicolon-separated list."""
    return [" ".join(topic.split()) for topic in text.split(";")]


def make_prompts(topics: str) -> list[tuple[str, str]]:
    """Every template filled with every topic, as (domain, prompt)."""
    return [
        (domain, template.format(topic))
        for domain, templates in TEMPLATES.items()
        for template, topic in product(templates, split_topics(topics))
    ]
