import time
from pathlib import Path
from tests.helpers.engines import *
from tests.helpers.models import make_random_model
def one(folder):
    t=time.time(); e=start(folder); t1=time.time(); m=hf_model(folder)
    from tests.helpers.models import randomize
    g=gap(m,requests(range(3)),run(e,requests(range(3)))); randomize(m,seed=3); sync(e,m,1)
    g2=gap(m,requests(range(3)),run(e,requests(range(3)))); d=differing(e,weights(m)); e.close()
    return t1-t,g,g2,d,time.time()-t1
def two(folder):
    t=time.time(); e=start(folder,2); t1=time.time(); m=hf_model(folder)
    from tests.helpers.models import randomize
    g=gap(m,requests(range(3)),run(e,requests(range(3)))); randomize(m,seed=3); sync(e,m,1)
    g2=gap(m,requests(range(3)),run(e,requests(range(3)))); d=differing(e,weights(m)); e.close()
    return t1-t,g,g2,d,time.time()-t1
if __name__=="__main__":
    f=make_random_model("qwen3",Path(tempfile.mkdtemp()))
    t=time.time(); print(run_alone(one,f), time.time()-t)
    t=time.time(); print(run_alone(two,f), time.time()-t)
