import glob,jax,collections,re,sys
f=sorted(glob.glob('/tmp/exp/tr/plugins/profile/*/*.xplane.pb'))[-1]
pd=jax.profiler.ProfileData.from_file(f)
hlo=open(f'/tmp/exp/hlo{sys.argv[1]}.txt').read()
shape={}
for line in hlo.splitlines():
    m=re.match(r'\s*(?:ROOT )?%?([\w.\-]+) = (.+?) (fusion|dot|copy|custom-call|reduce-window|convert|multiply|call)\(',line)
    if m: shape[m[1]]=re.sub(r'\{[^}]*\}','',m[2])[:40]
tot=collections.Counter();n=collections.Counter()
for pl in pd.planes:
    for line in pl.lines:
        if 'XLA' not in line.name: continue
        for e in line.events:
            if e.name in shape: 
                k=(re.sub(r'[.\d]+$','',e.name),shape[e.name]); tot[k]+=e.duration_ns/5e6; n[k]+=1
print('sum %.1f'%sum(tot.values()))
for k,v in tot.most_common(14): print(f'{v:7.2f} ms x{n[k]/5:.0f}',k)
