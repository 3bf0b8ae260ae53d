/** What `meshnet verify` reads where no text is given: plain English, written for it. */
export const VERIFY_TEXT = `The old harbour lies at the end of a narrow road that runs along the river. In the morning the boats come back with what the
night has given them, and people from the village walk down to buy fish before the shops are open. Nobody is in a hurry. The
baker stands in front of her door with a cup of coffee, the children wait for the bus, and the first train of the day can be
heard on the other side of the water long before it can be seen.

Water does not compress, which is why a pump that is full of it can lift a great weight with little effort. If the force on a
small piston is ten units, and the area of the large piston is twenty times that of the small one, then the force on the large
one is two hundred units. Nothing is gained for free: the small piston has to travel twenty times as far. The same is true of
levers, of gears and of every other simple machine.

She had written the letter three times and thrown it away twice. What she wanted to say was not difficult, but each sentence
seemed to ask for another one, and after four pages she no longer knew whether she was sorry or angry. So she took a new sheet
of paper and wrote only this: "I will be at the station on Friday. If you want to talk, come and find me."
`;
