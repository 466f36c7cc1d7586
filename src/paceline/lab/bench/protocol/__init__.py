"""How every benchmark here measures.

Rules: 1. Real processes (torchrun's), a real Gloo group over loopback or emulated links, one thread per rank. 2. All
sides live in the same processes in the same run and alternate; a load on the machine hits each of them. (A side that
needs a launcher of its own runs in launches that alternate; the report says so.) 3. A round visits the sides in one
order and then in the reverse (ABBA); odd rounds start from the other end (BAAB). 4. A step's time is the slowest
rank's. A barrier goes before each timed step. 5. Sides are compared within a round; what is reported is the median of
those ratios and their quartiles. 6. Raw samples are kept, with what is needed to run them again.
"""
