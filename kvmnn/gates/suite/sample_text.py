"""The text whose beginnings are prompts where nobody gives texts: prose, a recipe, a letter, a program, a table.

It was written for kvmnn and nothing in it repeats, as K and V of repeated words compress better than those of a text.
"""

SAMPLE_NAME = "built-in text"
"""What results call it."""

SAMPLE_TEXT = """\
The ferry leaves the north pier at ten past six, before the bakery has opened its shutters, and for the first quarter
of an hour the only passengers who talk are the gulls. In October the lake keeps a skin of mist that is thicker than
the one in spring; Marta, who has sold tickets here since her brother moved inland, says that she can tell the month
by the sound of the bell alone, because damp air swallows the higher notes. She writes each crossing into a ledger
with a green cover, although the company bought a machine that does it better. The machine counts people. The ledger
also counts dogs, bicycles, a harp, two beehives wrapped in a bedsheet, and once, in the dry summer of the great fire
on the ridge, a wedding party that had lost its groom.

Nobody remembers who decided that the boat should be called Patience. The older charts show another name at the
mooring, scratched out and written over by a careful hand, and the schoolteacher has a theory about an inspector from
the capital who was made to wait four days for a spare valve. What is certain is that the engine came from a sawmill.
It was built to turn a blade through wet oak, never to push forty tons of steel against a headwind, and it still pulls
to the left when it is cold. Captains learn to lean against the wheel with one hip while they pour their coffee. The
good ones do it without looking.

On the far shore the road climbs between walls of flat grey stone. Farmers built these without mortar, choosing each
piece for the gap it would fill, and a wall of that kind moves a little every winter and settles again when the frost
lets go. Engineers came in the nineties to replace a stretch near the chapel with concrete. It cracked in its third
year. The stone on both sides of it stands as before, and a family of stoats has moved into the crack, which pleases
the children and annoys the engineers. If you ask the man who keeps the sheep above it how long such a wall lasts, he
will answer that he does not know yet.

Bread for people who are in no hurry

Mix five hundred grams of flour with three hundred and forty of water that feels neither warm nor cool on the wrist.
Leave it under a cloth while you do something else for half an hour; the flour drinks meanwhile, and the dough that
was a rough heap becomes one that can be stretched. Then add ten grams of salt and a spoonful of the starter that you
fed last night. Fold the dough over itself four times, turn the bowl by a quarter, and fold again. Wait. Do this every
forty minutes until the surface shines and a bubble or two shows at the side of the glass. In a cold kitchen that
takes all afternoon, in July it is done before lunch, and the clock is the worst judge of it. Shape a ball, put it
into a basket dusted with rye, and let it spend the night in the refrigerator. Bake it in a closed iron pot at two
hundred and fifty degrees for twenty-five minutes and without the lid for as long as your courage lasts: the crust
should be darker than you think is decent. The hardest step comes afterwards. A loaf that is cut while it is hot
tastes of steam and regret.

Dear Ioana,

your parcel came on Tuesday with a corner missing, so either the post has mice or somebody likes quince jelly as much
as I do. The survey is finished at last. We measured eleven wells between the river and the railway, and in nine of
them the water stands lower than in your father's notebook, by a hand's width near the bridge and by almost two metres
under the new greenhouses. I plotted the numbers against the distance from the pumps and the curve is so smooth that
Petru accused me of inventing it. Tomorrow we present it to the council. They will say that one dry decade proves
nothing, which is true, and that the tomatoes pay for the school roof, which is also true, and I have no answer to the
second except that a roof over a village without water keeps nobody dry. Bring the long tape when you visit, and the
other boots. The path along the dyke has been eaten by badgers again.
With love, and with apologies for the handwriting (the table is a door on two trestles),
Vasile

How a clock loses time

A pendulum does not care how far it swings, as long as it does not swing far; that was the discovery, and for sixty
years people believed it was exact. It is not. A wide arc takes slightly longer than a narrow one, by about one part
in sixteen thousand for an arc of two degrees more, so a clock with a fresh spring runs slow and gains as the spring
relaxes. Heat lengthens the rod: a brass one by nineteen millionths for each degree, steel by eleven or twelve, pine
along the grain by less than five, which is why cheap wooden pendulums in farm kitchens often kept better time than
polished ones in banks. Clever makers hung jars of mercury below the bob. When the rod grew downwards the mercury rose
in its jar, and the middle of the mass stayed where it was. Air matters too, since the bob floats in it a little; on a
day of high pressure it floats more and falls more slowly. None of these errors is larger than a yawn. Added up over a
voyage of seventy days they put a ship on the wrong side of an island.

def shortest_queue(arrivals, service, counters=3):
    \"\"\"Simulate customers who join the counter that will be free first; return the mean wait in minutes.\"\"\"
    free_at = [0.0] * counters
    waited = 0.0
    for moment, minutes in zip(arrivals, service):
        best = min(range(counters), key=free_at.__getitem__)
        start = max(moment, free_at[best])
        waited += start - moment
        free_at[best] = start + minutes
    return waited / len(arrivals) if arrivals else float("nan")

The function above contains the mistake that every shop makes. It assumes that a customer knows how long the people
ahead will take. Real ones look at baskets, guess, and discover the man who wants to pay a gas bill with coins.
Suppose instead that everybody joins one line and the person at its head walks to whichever counter opens next: the
average wait hardly changes, but the worst one shrinks to a third, and with it the number of letters to the manager.
Post offices in Lisbon and Osaka arrived at this independently. Supermarkets resisted, because a single line of thirty
trolleys looks longer than six lines of five, and people choose a shop by what they see from the car park.

Tide table for the outer harbour, heights in metres above the chart
  Mon  03:12  4.6   09:31  0.9   15:40  4.4   21:48  1.1
  Tue  03:58  4.9   10:14  0.6   16:25  4.7   22:33  0.8
  Wed  04:41  5.1   10:57  0.4   17:09  4.9   23:16  0.6
  Thu  05:24  5.2   11:40  0.3   17:53  4.9
  Fri  00:00  0.6   06:08  5.1   12:24  0.5   18:38  4.7

She read the last line twice and put the table back behind the barometer. With the wind in the south-west there would
be thirty centimetres more than printed, perhaps forty on Thursday, and the cellar of the customs house would have to
be pumped before the painters arrived. It was not her cellar. Still, she had a key to it, a pump that started at the
second pull, and a nephew who owed her a weekend. The harbour master had once asked, at a funeral where everybody had
drunk a little, what she actually did all day. She had thought about that for most of a year. Mostly I notice things,
she would tell him now; then I decide which of them can wait.

The committee met in the gymnasium because the library smelled of varnish. Eleven members had come, which was one more
than the rules required and two fewer than the chairs. Item four, the proposal to move the lime trees, had been
postponed since March. A botanist explained through a borrowed microphone that trees of ninety years can be lifted
with their roots in a frame the size of a lorry, watered for three summers by hand, and will then die anyway in four
cases out of ten. The architect replied that a drawing without them had already been approved. Somebody's telephone
played a polka. In the end they voted to move the cycle path instead, with a bend around each trunk, and a girl of
about nine who had been waiting for her grandmother wrote down on the back of an agenda: bends are slower but nobody
has to be carried.

What follows from all this? A practical person would say: keep a ledger, lean against the wheel, choose each stone for
its gap, let the dough decide, measure the wells while they still have water, distrust a constant that nobody has
checked in bad weather, stand in one line, and leave the trees alone. The philosopher at the end of the bar would
object that advice of this sort fits everything and therefore helps with nothing. Both of them have taken the ferry
this morning. One looked at the engine and the other at the mist, and when the bell rang they got up at the same
moment, as people do who have crossed a lake together without exchanging a word, and held the gate open for a woman
with a harp.
"""
