# Draws the figures of these pages from the CSV files beside them. From the root of the tree: make figures
set terminal svg size 760,420 noenhanced font 'sans-serif,13' background '#ffffff'
set encoding utf8
set datafile separator comma
set datafile missing 'nan'
set border 3 linecolor rgb '#5a6069'
set tics nomirror textcolor rgb '#5a6069'
set grid linecolor rgb '#dfe2e6' linetype 1
set key below left Left reverse samplen 2
set tmargin 3
set bmargin 6.5
folder = 'bench/results/'
# Okabe and Ito's colours, which people with colour-blindness tell apart.
blue = '#0072b2'; orange = '#d55e00'; green = '#007f5f'; purple = '#a8528a'; ochre = '#b07c00'; sky = '#3d8fc4'; grey = '#6b6f76'
bar = 'nohead linecolor rgb "#1c1f24" linewidth 1.2' # an interval, from its lower end

# --- engine: prefill against the floor of the same run ---------------------------------------------------------
set output folder.'engine.svg'
set title 'Prefill of 512 tokens, bf16, random weights, 2 vCPUs of an AMD EPYC'
set ylabel 'GFLOP/s of the weight products'
set yrange [0:500]
set xrange [-0.6:3.6]
set boxwidth 0.55
set style fill solid 1 noborder
set xtics scale 0 ("110 M\n1 thread" 0, "1.1 B\n1 thread" 1, "110 M\n2 threads" 2, "1.1 B\n2 threads" 3)
file = folder.'engine-bench-epyc-2vcpu.csv'
prefill(model, threads) = strcol(1) eq '490db7e' && strcol(4) eq 'bf16' && column(7) == 512 && strcol(3) eq model && column(5) == threads && column(6) == 1 && strcol(10) eq 'prefill'
place = 'prefill("llama-110m", 1) ? 0 : prefill("llama-1.1b", 1) ? 1 : prefill("llama-110m", 2) ? 2 : prefill("llama-1.1b", 2) ? 3 : NaN'
stats folder.'kernels-epyc-2vcpu.csv' using (strcol(1) eq '490db7e' && strcol(4) eq 'bf16 dot' && $2 == 1 ? $7 : NaN) name 'one' nooutput
stats folder.'kernels-epyc-2vcpu.csv' using (strcol(1) eq '490db7e' && strcol(4) eq 'bf16 dot' && $2 == 2 ? $7 : NaN) name 'two' nooutput
set arrow 1 from -0.5,one_max to 1.5,one_max nohead linecolor rgb orange linewidth 2 dashtype (8,5)
set arrow 2 from 1.5,two_max to 3.5,two_max nohead linecolor rgb orange linewidth 2 dashtype (8,5)
plot file skip 1 using (@place):14 with boxes linecolor rgb blue title 'prefill', \
     file skip 1 using (@place):($14 * $12 / $11):(0):($14 * ($13 - $12) / $11) with vectors @bar title 'least..greatest', \
     NaN with lines linecolor rgb orange linewidth 2 dashtype (8,5) title 'bf16 dot in L1'
unset arrow 1; unset arrow 2; set xtics auto; unset xrange; set xtics scale 1

# --- transfer: each path over its floor, by size -----------------------------------------------------------------
set output folder.'transfer.svg'
set title 'KV transfer on one host over its floor, 16 in flight, 2 vCPUs of an AMD EPYC'
set xlabel 'bytes of one transfer'
set ylabel 'speed over the floor of the same run'
set logscale x 2
set xrange [49152:25165824]
set yrange [0:2]
set xtics ('64 KiB' 65536, '256 KiB' 262144, '1 MiB' 1048576, '16 MiB' 16777216)
file = folder.'xfer-epyc-2vcpu-quiet.csv'
row(path, streams) = strcol(1)[1:7] eq '1991f23' && strcol(6) eq path && $10 == 16 && $11 == streams
set arrow 1 from graph 0,first 1 to graph 1,first 1 nohead linecolor rgb grey dashtype (8,5)
plot file skip 1 using (row('shm', 1) ? $8 * 0.93 : NaN):25:26:27 with yerrorlines linecolor rgb blue linewidth 1.5 pointtype 7 pointsize 0.7 title 'shm over memcpy', \
     file skip 1 using (row('tcp', 1) ? $8 : NaN):29:30:31 with yerrorlines linecolor rgb orange linewidth 1.5 pointtype 5 pointsize 0.7 title 'tcp over iperf3, 1 stream', \
     file skip 1 using (row('tcp', 4) ? $8 * 1.07 : NaN):29:30:31 with yerrorlines linecolor rgb green linewidth 1.5 pointtype 9 pointsize 0.8 title 'tcp over iperf3, 4 streams'
unset arrow 1; unset logscale x; set xtics auto; unset xrange

# --- router: what a placement costs -------------------------------------------------------------------------------
set output folder.'router.svg'
set title 'One placement among 500 + 500 workers with 10,000 live requests, CPU time'
unset xlabel
set ylabel 'us'
set yrange [0:25]
file = folder.'router_core.csv'
policies = 'round_robin power_of_two goodput kv_cost least_token lmetric least_request cache_aware conductor'
set xrange [-0.6:8.6]
set bmargin 8
set xtics scale 0 rotate by -30
set for [i=1:9] xtics add (word(policies, i) i - 1)
at(policy) = 1.0 * (strstrt(policies.' ', policy.' ') == 1 ? 0 : words(substr(policies, 1, strstrt(policies.' ', ' '.policy.' '))))
quiet(shape) = strcol(1) eq 'epyc-2vcpu-quiet' && strcol(2) eq '179bbde' && strcol(4)[1:6] eq 'place ' && strcol(5) eq shape
which = 'strcol(4)[7:*]'
set boxwidth 0.36
plot file skip 1 using (quiet('no prefixes') ? at(@which) - 0.2 : NaN):($6 / 1000) with boxes linecolor rgb blue title 'no prefixes', \
     file skip 1 using (quiet('prompts of 100 blocks that 5 hold') ? at(@which) + 0.2 : NaN):($6 / 1000) with boxes linecolor rgb orange title '100 blocks, on 5 workers', \
     file skip 1 using (quiet('no prefixes') ? at(@which) - 0.2 : NaN):($7 / 1000):(0):(($8 - $7) / 1000) with vectors @bar title 'least..greatest', \
     file skip 1 using (quiet('prompts of 100 blocks that 5 hold') ? at(@which) + 0.2 : NaN):($7 / 1000):(0):(($8 - $7) / 1000) with vectors @bar notitle
set xtics norotate auto scale 1; unset xrange; set bmargin 7.5

# --- goodput: requests within both objectives, by policy ----------------------------------------------------------
set output folder.'goodput.svg'
set title 'Requests within both objectives, 2 prefill + 4 decode workers (simulated: OPT-13B, 400 / 50 ms)'
set xlabel 'requests/s (Poisson arrivals, lengths of the Azure conversation trace)'
set ylabel 'share of all arrivals'
set format y '%g %%'
set xrange [9:27]
set yrange [0:105]
file = folder.'sim_policies_poisson.csv'
set arrow 1 from graph 0,first 90 to graph 1,first 90 nohead linecolor rgb grey dashtype (8,5)
policies = 'goodput conductor kv_cost least_token least_request lmetric power_of_two round_robin cache_aware'
inks = blue.' '.orange.' '.green.' '.purple.' '.ochre.' '.sky.' '.grey.' #8a2b2b #1c1f24'
do for [i=1:9] { # the seeds of one rate become their mean below
  eval sprintf("set table $p%d separator comma; plot file skip 1 using 5:($15 * 100) with table if (strcol(1) eq word(policies, i)); unset table", i)
}
lines(i) = sprintf('$p%d using 1:2 smooth unique with linespoints linewidth %g pointtype %d pointsize 0.7 linecolor rgb "%s" title "%s"', \
                   i, i == 1 ? 3 : 1.5, i == 1 ? 7 : 2 * i, word(inks, i), word(policies, i))
all = lines(1)
do for [i=2:9] { all = all.', '.lines(i) }
eval 'plot '.all
unset arrow 1; unset xrange; set format y '%g'

# --- simulator against live -----------------------------------------------------------------------------------------
set output folder.'simulator.svg'
set size ratio -1
set key outside right top vertical
set bmargin 4
set title 'Requests within both objectives: live against simulated, 36 points in 3 runs'
set xlabel 'simulated'
set ylabel 'live (bars: 95 % interval)'
set format x '%g %%'; set format y '%g %%'
set xrange [0:105]; set yrange [0:105]
live(mode) = strcol(2) eq mode
files = folder.'sim_live-epyc-2vcpu.csv '.folder.'sim_live-epyc-2vcpu-2.csv '.folder.'sim_live-epyc-2vcpu-3.csv'
plot x with lines linecolor rgb grey dashtype (8,5) title 'equal', \
     for [f in files] f skip 1 using (live('pd') ? $28 * 100 : NaN):($11 * 100):($12 * 100):($13 * 100) with yerrorbars linecolor rgb blue pointtype 7 pointsize 0.7 notitle, \
     for [f in files] f skip 1 using (live('colocated') ? $28 * 100 : NaN):($11 * 100):($12 * 100):($13 * 100) with yerrorbars linecolor rgb orange pointtype 5 pointsize 0.7 notitle, \
     for [f in files] f skip 1 using (live('hybrid') ? $28 * 100 : NaN):($11 * 100):($12 * 100):($13 * 100) with yerrorbars linecolor rgb green pointtype 9 pointsize 0.8 notitle, \
     NaN with points linecolor rgb blue pointtype 7 title 'pd', NaN with points linecolor rgb orange pointtype 5 title 'colocated', \
     NaN with points linecolor rgb green pointtype 9 title 'hybrid'
