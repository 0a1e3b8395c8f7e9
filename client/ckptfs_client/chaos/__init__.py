"""`ckptfs chaos`: seeded faults against a lab, and a verdict on the promises.

Applications save and load checkpoints in the lab meanwhile.

`schedule` says which fault comes when (pure), `applications` write as programs do, `expected_content` knows what readers may see, and
`campaign` plays all of them. The tests run the same campaign.
"""
